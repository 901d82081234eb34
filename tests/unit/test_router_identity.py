"""Who asks: what a request says of itself, and how its prompt is known again."""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_war.routing.http.answer import Answer, token_ids
from nemo_war.routing.http.identity import announced
from nemo_war.routing.http.prompt import read_prompt, variant
from nemo_war.routing.http.trajectories import Trajectories

SYSTEM = {"role": "system", "content": "be brief"}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def chat(text: str, **message) -> Answer:
    answer = Answer()
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}}
    answer.read(json.dumps({"choices": [choice]}).encode())
    return answer


class Client:
    """Takes turns as the router serves them."""

    def __init__(self, idle_s: float = 600, limit: int = 1000) -> None:
        self.ended: list[str] = []
        self.known = Trajectories(idle_s, limit, self.ended.append)

    def turn(self, fields: dict, answer: Answer | None, now: float = 0.0, **named):
        prompt = read_prompt(fields)
        begun = self.known.begin(prompt, **named)
        if answer is not None:
            self.known.stands(begun.trajectory, prompt.after(answer))
        self.known.finish(begun.trajectory, now)
        assert self.known.check_integrity()
        return begun


@pytest.mark.parametrize("name", ["X-Session-Id", "X-SMG-Routing-Key", "x-nemo-war-trajectory"])
def test_a_session_header_names_the_trajectory(name):
    from multidict import CIMultiDict

    said = announced(CIMultiDict({name: "t7", "X-Nemo-War-Group": "g"}), {"session_id": "other"})
    assert (said.trajectory, said.group) == ("t7", "g")


@pytest.mark.parametrize("carrier", ["vllm_xargs", "extra_args"])
@pytest.mark.parametrize("wrap", [lambda value: value, json.dumps])
def test_our_metadata_is_read_as_an_object_and_as_text(carrier, wrap):
    war = {"trajectory": "t", "group": "g", "turn": 3, "epoch": 2, "learn": False}
    said = announced({}, {carrier: {"war": wrap(war)}})
    assert (said.trajectory, said.group, said.metadata.turn, said.metadata.epoch) == ("t", "g", 3, 2)


@pytest.mark.parametrize(
    "war", [7, "no json", {"trajectory": "t"}, {"trajectory": 1, "group": "g"}, "[" * 10**5]
)
def test_metadata_that_is_not_ours_is_refused(war):
    with pytest.raises(ValueError, match="war"):
        announced({}, {"vllm_xargs": {"war": war}})


def test_a_session_id_is_found_where_vllm_looks_for_it():
    assert announced({}, {"session_id": "s"}).trajectory == "s"
    assert announced({}, {"vllm_xargs": {"session_id": "s"}}).trajectory == "s"
    assert announced({}, {"session_id": 3}).trajectory is None


def test_a_conversation_that_goes_on_is_the_same_trajectory():
    client = Client()
    messages = [SYSTEM, user("task")]
    names = []
    for number in range(4):
        begun = client.turn({"messages": messages}, chat(f"answer {number}"))
        names.append((begun.trajectory, begun.turn))
        messages = [*messages, {"role": "assistant", "content": f"answer {number}"}, user(f"result {number}")]
    assert names == [(names[0][0], number) for number in range(4)]


def test_siblings_are_trajectories_of_one_group_and_are_told_apart_by_their_answers():
    client = Client()
    start = [SYSTEM, user("task")]
    siblings = [client.turn({"messages": start}, chat(f"answer {n}")) for n in range(8)]
    assert len({each.trajectory for each in siblings}) == 8
    assert len({each.group for each in siblings}) == 1
    assert client.turn({"messages": [SYSTEM, user("another")]}, None).group != siblings[0].group
    for number in random.Random(1).sample(range(8), 8):
        answer = {"role": "assistant", "content": f"answer {number}"}
        again = client.turn({"messages": [*start, answer, user("go on")]}, chat("done"))
        assert (again.trajectory, again.turn) == (siblings[number].trajectory, 1)


def test_siblings_with_the_same_answer_each_go_on_once():
    client = Client()
    start = [user("task")]
    names = {client.turn({"messages": start}, chat("same")).trajectory for _ in range(5)}
    follow = {"messages": [*start, {"role": "assistant", "content": "same"}, user("next")]}
    assert Counter(client.turn(follow, None).trajectory for _ in range(5)) == Counter(names)


def test_a_request_repeated_after_a_failure_is_the_same_turn():
    client = Client()
    first = client.turn({"messages": [user("task")]}, chat("a"))
    follow = {"messages": [user("task"), {"role": "assistant", "content": "a"}, user("next")]}
    assert client.turn(follow, None).trajectory == first.trajectory
    assert client.turn(follow, chat("b")).trajectory == first.trajectory


def test_a_message_is_known_again_however_the_client_writes_it():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    client = Client()
    first = client.turn({"messages": [user("task")]}, chat("text ", tool_calls=[call], reasoning="secret"))
    echoed = {
        "role": "assistant",
        "refusal": None,
        "content": [{"type": "text", "text": "text"}],
        "tool_calls": [call],
    }
    task = user([{"type": "text", "text": "task"}])
    again = client.turn({"messages": [task, echoed, {"role": "tool", "content": "1"}]}, None)
    assert again.trajectory == first.trajectory


def test_a_streamed_answer_is_known_again():
    answer = Answer()
    pieces = [{"content": "he"}, {"content": "llo"}]
    pieces += [{"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}]}]
    pieces += [{"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}]
    for piece in pieces:
        answer.feed(b"data: " + json.dumps({"choices": [{"index": 0, "delta": piece}]}).encode() + b"\n\n")
    answer.feed(b'data: {"choices": [], "usage": {"completion_tokens": 9}}\n\n')
    assert answer.outcome() is None
    answer.feed(b"data: [DONE]\n\n")
    assert answer.outcome().output_tokens == 9
    client = Client()
    first = client.turn({"messages": [user("task")]}, answer)
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    echoed = {"role": "assistant", "content": "hello", "tool_calls": [call]}
    assert client.turn({"messages": [user("task"), echoed]}, None).trajectory == first.trajectory


def test_nemo_gym_is_known_by_the_tokens_it_sends_back_even_where_texts_changed():
    client = Client()
    ids = {"prompt_token_ids": list(range(50)), "generation_token_ids": list(range(100, 110))}
    start = [user("task")]
    first = client.turn({"messages": start}, chat("original", **ids))
    rewritten = {"role": "assistant", "content": "rewritten", **ids}
    fields = {"messages": [user("task!"), rewritten, user("more" * 10)]}
    again = client.turn(fields, None)
    assert (again.trajectory, again.group) == (first.trajectory, first.group)
    prompt = read_prompt(fields)
    assert prompt.tokens.ids.tolist() == [*range(50), *range(100, 110)]
    assert 70 <= client.known.lengths.tokens(prompt, again.course) <= 90
    outright = {"messages": [user("?")], "required_prefix_token_ids": [*range(50), *range(100, 110)]}
    assert client.turn(outright, None).trajectory == first.trajectory


def test_prompts_in_tokens_go_on_where_prompt_and_answer_ended():
    client = Client()
    prompt = list(range(100))

    def answer(ids: list[int]) -> Answer:
        got = Answer()
        choice = {"index": 0, "text": "", "prompt_token_ids": None, "token_ids": ids}
        got.read(json.dumps({"choices": [choice]}).encode())
        return got

    siblings = [client.turn({"prompt": prompt}, answer([1000 + n] * 5)) for n in range(4)]
    assert len({each.trajectory for each in siblings}) == 4
    assert len({each.group for each in siblings}) == 1
    for number in (2, 0, 3, 1):
        again = client.turn({"prompt": [*prompt, *[1000 + number] * 5, 7]}, None)
        assert again.trajectory == siblings[number].trajectory


@given(st.lists(st.integers(1, 40), min_size=2, max_size=6), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_token_prompts_that_only_share_a_beginning_are_kept_apart(lengths, seed):
    random_ids = random.Random(seed)
    client = Client()
    trunk = [random_ids.randrange(1000) for _ in range(20)]
    begun = {}
    for number, length in enumerate(lengths):
        ids = [*trunk, 2000 + number, *(random_ids.randrange(1000) for _ in range(length))]
        begun[tuple(ids)] = client.turn({"prompt": ids}, chat("")).trajectory
    for ids, name in begun.items():
        assert client.turn({"prompt": [*ids, 5]}, None).trajectory == name


def test_memory_is_bounded_under_a_stream_of_distinct_prompts():
    client = Client(limit=50)
    for number in range(1000):
        client.turn({"messages": [user(f"task {number}")]}, chat("a"), now=number)
    assert len(client.known) == 50
    assert len(client.ended) == 950
    for number in range(1000):
        client.turn({"messages": [user("same")]}, chat("same"), now=number)
    assert len(client.known) == 50
    client.known.expire(now=5000)
    assert len(client.known) == 0
    assert client.known.check_integrity()


def test_a_trajectory_with_a_turn_under_way_is_not_ended():
    client = Client(idle_s=1, limit=1)
    prompt = read_prompt({"messages": [user("x")]})
    client.known.begin(prompt, "busy")
    client.turn({"messages": [user("y")]}, None, name="short")
    client.known.expire(now=100)
    assert client.ended == ["short"]
    client.known.finish("busy", now=100)
    client.known.expire(now=102)
    assert client.ended == ["short", "busy"]


def test_a_trajectory_ends_when_its_client_says_so():
    client = Client()
    client.turn({"messages": [user("x")]}, None, name="mine")
    client.known.end("mine")
    client.known.end("mine")
    client.known.end("nobody's")
    assert (client.ended, len(client.known)) == (["mine"], 0)
    assert client.turn({"messages": [user("x")]}, None, name="mine").turn == 0


def test_said_to_be_over_during_its_turn_it_ends_with_that_one_unless_it_goes_on():
    client = Client()
    prompt = read_prompt({"messages": [user("x")]})
    for name in ("over", "going on"):
        client.known.begin(prompt, name)
        client.known.end(name)
    client.known.begin(prompt, "going on")
    client.known.finish("over", now=1)
    client.known.finish("going on", now=1)
    assert client.ended == ["over"]
    client.known.finish("going on", now=2)
    assert client.ended == ["over"]
    assert client.known.check_integrity()


def test_an_adapter_a_salt_and_images_make_another_variant():
    def of(**fields) -> str:
        return variant(fields, read_prompt(fields))

    image = [{"type": "image_url", "image_url": {"url": "data:1"}}]
    other = [{"type": "image_url", "image_url": {"url": "data:2"}}]
    kinds = [
        of(messages=[user("x")], model="m"),
        of(messages=[user("y")], model="adapter"),
        of(messages=[user("x")], model="m", cache_salt="s"),
        of(messages=[user(image)], model="m"),
        of(messages=[user(other)], model="m"),
    ]
    assert len(set(kinds)) == 5
    pictures = [read_prompt({"messages": [user(each)]}) for each in (image, other)]
    assert pictures[0].group != pictures[1].group
    assert pictures[0].size == pictures[1].size < 40
    assert of(messages=[user("y")], model="m") == kinds[0]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = """role content text tool_calls function arguments id index messages prompt prompt_token_ids
generation_token_ids required_prefix_token_ids choices message delta usage tools model"""
KEYS = st.sampled_from(NAMES.split())
shaped = st.recursive(
    json_values | st.just("assistant") | st.lists(st.integers(0, 9), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)


@given(st.dictionaries(KEYS, shaped, max_size=6), st.dictionaries(KEYS, shaped, max_size=6))
@settings(max_examples=60, deadline=None)
def test_whatever_a_body_and_an_answer_hold_they_are_read_without_an_error(fields, reply):
    answer = Answer()
    answer.read(json.dumps(reply).encode())
    begun = Client().turn(json.loads(json.dumps(fields)), answer)
    assert begun.trajectory.startswith(begun.group)
    assert isinstance(variant(fields, read_prompt(fields)), str)
    answer.outcome()


def test_token_ids_are_lists_of_numbers_and_nothing_else():
    assert token_ids([1, 2]).tolist() == [1, 2]
    assert token_ids([1, 2]).dtype == np.int32
    for wrong in (None, [], "12", [True], [[1], [2]], [1, "x"], [1, [2]], [1, 2**40], [1.5]):
        assert token_ids(wrong) is None
