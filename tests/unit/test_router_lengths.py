"""How long prompts of text are: what is learned from the counts in answers, and what placement sees of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_war.routing.http.lengths import Course, Lengths
from nemo_war.routing.http.prompt import Prompt, read_prompt


def chat(*texts: str, **fields) -> Prompt:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return read_prompt({"messages": messages, **fields})


def pieces(prompt: Prompt, lengths: Lengths, course: Course) -> np.ndarray:
    found = prompt.beginning(lengths.tokens(prompt, course), course.stride)
    assert found is not None
    return found


def test_at_first_a_token_is_four_bytes():
    lengths = Lengths()
    prompt = chat("x" * 4000)
    assert lengths.tokens(prompt, lengths.course()) == prompt.size // 4
    assert lengths.tokens(read_prompt({"prompt": "x" * 4000}), lengths.course()) == 1000


def test_one_answer_tells_a_trajectory_how_long_it_is():
    lengths = Lengths()
    course, texts = lengths.course(), ["x" * 8000]
    lengths.learn(chat(*texts), course, 5000)
    assert lengths.tokens(chat(*texts), course) == 5000
    texts += ["y" * 180, "z" * 180]
    assert lengths.tokens(chat(*texts), course) == pytest.approx(5100, abs=25)


def test_a_new_trajectory_is_measured_by_what_others_turned_out_to_be():
    lengths = Lengths()
    for number in range(20):
        lengths.learn(chat(f"{number}" + "x" * 6000), lengths.course(), 1000)
    assert lengths.tokens(chat("y" * 12_000), lengths.course()) == pytest.approx(2000, rel=0.02)


def test_what_is_added_has_a_ratio_of_its_own():
    lengths = Lengths()
    for number in range(50):
        course, first = lengths.course(), f"{number}" + "x" * 6000
        lengths.learn(chat(first), course, 1000)
        lengths.learn(chat(first, "y" * 1000, "z" * 1000), course, 2000)
    assert lengths.tokens(chat("x" * 6000), lengths.course()) == pytest.approx(1000, rel=0.03)
    course = lengths.course()
    lengths.learn(chat("x" * 6000), course, 1000)
    assert lengths.tokens(chat("x" * 6000, "y" * 500, "z" * 500), course) == pytest.approx(1500, rel=0.03)


def test_a_history_that_was_cut_is_measured_anew():
    lengths = Lengths()
    course = lengths.course()
    lengths.learn(chat("x" * 8000), course, 2000)
    assert lengths.tokens(chat("x" * 400), course) == pytest.approx(100, rel=0.1)


def test_counts_that_are_missing_or_cannot_be_teach_nothing():
    lengths = Lengths()
    course, prompt = lengths.course(), chat("x" * 8000)
    before = lengths.tokens(prompt, course)
    for counted in (0, 1):
        lengths.learn(prompt, course, counted)
        assert lengths.tokens(prompt, course) == before


def test_the_tokens_of_images_count_for_their_trajectory_only():
    lengths = Lengths()
    course = lengths.course()
    lengths.learn(chat("look"), course, 3000)
    assert lengths.tokens(chat("look"), course) == 3000
    assert lengths.tokens(chat("x" * 4000), lengths.course()) == pytest.approx(1000, rel=0.02)


def test_where_tokens_are_given_only_the_rest_is_estimated():
    lengths = Lengths()
    message = {"prompt_token_ids": [1] * 90, "generation_token_ids": [2] * 10, "role": "assistant"}
    prompt = read_prompt({"messages": [message, {"role": "user", "content": "x" * 4000}]})
    course = lengths.course()
    assert lengths.tokens(prompt, course) == pytest.approx(1100, abs=10)
    for _ in range(20):
        lengths.learn(prompt, course, 600)
    assert lengths.tokens(prompt, course) == pytest.approx(600, rel=0.05)
    assert prompt.beginning(5, 7.0).tolist() == [1] * 90 + [2] * 10


def test_tools_are_what_a_prompt_begins_with():
    lengths = Lengths()
    bare, tools = chat("x" * 4000), [{"type": "function", "function": {"name": "f" * 400}}]
    with_tools = chat("x" * 4000, tools=tools)
    assert lengths.tokens(with_tools, lengths.course()) > lengths.tokens(bare, lengths.course()) + 100
    assert pieces(with_tools, lengths, lengths.course())[0] != pieces(bare, lengths, lengths.course())[0]
    assert with_tools.group == bare.group


@given(
    st.lists(st.text(min_size=1, max_size=400), min_size=1, max_size=9),
    st.lists(st.floats(0.5, 12), min_size=9, max_size=9),
)
@settings(max_examples=60, deadline=None)
def test_a_trajectorys_pieces_go_on_whatever_is_learned_meanwhile(texts, ratios):
    lengths = Lengths()
    course, last = lengths.course(), np.zeros(0, np.int32)
    for number in range(0, len(texts), 2):
        prompt = chat(*texts[: number + 1])
        now = pieces(prompt, lengths, course)
        assert len(now) <= lengths.tokens(prompt, course)
        common = min(len(now), len(last))
        assert now[:common].tolist() == last[:common].tolist()
        last = now
        lengths.learn(prompt, course, round(prompt.size / ratios[number]))
        for other in range(5):
            lengths.learn(chat(f"{other}" * 3000), lengths.course(), 900)


def test_there_are_about_as_many_pieces_as_tokens_once_others_were_counted():
    lengths = Lengths()
    for number in range(5):
        lengths.learn(chat(f"{number}" * 6000), lengths.course(), 1000)
    siblings = [(chat("task" * 1500, f"{n}" * 600, "result" * 100), lengths.course()) for n in range(2)]
    first, second = (pieces(prompt, lengths, course) for prompt, course in siblings)
    assert len(first) == pytest.approx(lengths.tokens(*siblings[0]), rel=0.1)
    shared = int((first[:900] == second[:900]).sum())
    assert shared == 900
    assert not np.array_equal(first[1100:1150], second[1100:1150])
    for number in range(100):  # small changes move no stride
        prompt = chat(f"{number:02}" * 3000)
        lengths.learn(prompt, lengths.course(), round(prompt.size / 5.9))
    assert lengths.course().stride == siblings[0][1].stride


@pytest.mark.parametrize("text", ["", "x", "ab", "日本語" * 50])
def test_texts_of_any_size_have_pieces(text):
    prompt = chat(text)
    for stride in (1.0, 4.0, 7.3):
        found = prompt.beginning(10**6, stride)
        assert -1 <= prompt.size / stride - len(found) <= 20
        assert len(prompt.beginning(0, stride)) == 0
