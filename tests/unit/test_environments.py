from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from nemo_war.errors import ConfigError
from nemo_war.generation.embedded.environments import build
from nemo_war.generation.embedded.environments.arithmetic import MAX_CHARACTERS, evaluate, show
from nemo_war.generation.embedded.environments.calculator import (
    STOP_STRINGS,
    CalculatorConfig,
    CalculatorState,
)
from nemo_war.generation.embedded.environments.file_edit import FileEditConfig, FileEditState
from nemo_war.generation.embedded.environments.interface import EnvironmentReturn

EDIT = build("file_edit", FileEditConfig())
CALC = build("calculator", CalculatorConfig())
EXPECTED = ("color = red", "limit = 9", "mode = fast", "port = 25", "size = 7")
STATE = FileEditState(expected=EXPECTED, changed=frozenset({1}), request="Print the file.")
SUM = CalculatorState(84)
ORIGINAL = [line.replace("limit = 9", "limit = 4") for line in EXPECTED]


def edit(text: str, state: FileEditState = STATE) -> EnvironmentReturn:
    return EDIT.step([[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]], [state])


def calc(text: str, state: CalculatorState = SUM) -> EnvironmentReturn:
    return CALC.step([[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]], [state])


def fenced(lines: list[str] | tuple[str, ...]) -> str:
    return "\n".join(("```", *lines, "```"))


# Both environments


@pytest.mark.parametrize("environment", [EDIT, CALC])
def test_tasks_are_a_pure_function_of_seed_and_count(environment) -> None:
    tasks = environment.tasks(7, 6)
    assert tasks == environment.tasks(7, 6)
    assert tasks[:3] == environment.tasks(7, 3)
    assert tasks[0].messages != environment.tasks(8, 1)[0].messages
    assert len({task.name for task in tasks}) == 6


@pytest.mark.parametrize("environment", [EDIT, CALC])
@given(text=st.text() | st.text(alphabet="`<>/=calcnswer0123456789+-*(). \n\r\x00²٣"))
def test_no_text_of_a_model_raises(environment, text: str) -> None:
    task = environment.tasks(0, 1)[0]
    result = environment.step([[*task.messages, {"role": "assistant", "content": text}]], [task.metadata])
    assert 0.0 <= result.rewards[0] <= 1.0
    assert len(result.observations[0]["content"]) < 2000


def test_an_unknown_environment_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"env\.name='chess': allowed: calculator, file_edit"):
        build("chess", None)


# File edit


def test_an_exact_answer_to_a_generated_task_ends_the_episode_with_reward_one() -> None:
    tasks = EDIT.tasks(3, 20)
    logs = [[{"role": "assistant", "content": fenced(task.metadata.expected)}] for task in tasks]
    result = EDIT.step(logs, [task.metadata for task in tasks])
    assert result.rewards == [1.0] * 20
    assert result.terminateds == [True] * 20
    assert result.metadata == [None] * 20


def test_the_shown_file_differs_from_the_expected_one_in_the_changed_lines_only() -> None:
    for task in build("file_edit", FileEditConfig(changes=3)).tasks(0, 20):
        shown = task.messages[-1]["content"].split("```")[1].strip().splitlines()
        wrong = {at for at, line in enumerate(shown) if line != task.metadata.expected[at]}
        assert wrong == task.metadata.changed
        assert len(wrong) == 3


def test_copying_the_file_unchanged_earns_nothing() -> None:
    result = edit(fenced(ORIGINAL))
    assert result.rewards == [0.0]
    assert result.terminateds == [False]


def test_the_observation_names_wrong_lines_and_what_was_found_but_not_the_answer() -> None:
    text = edit(fenced(ORIGINAL)).observations[0]["content"]
    assert text.splitlines()[0] == "Line 2 is wrong: `limit = 4`"
    assert "limit = 9" not in text
    assert text.endswith(STATE.request)


def test_a_damaged_line_is_subtracted_from_the_credit() -> None:
    damaged = [line.replace("25", "26") for line in EXPECTED]
    assert edit(fenced(damaged)).rewards == [pytest.approx(1 - 1 / 4)]


def test_a_line_left_out_costs_one_line_and_not_those_that_follow() -> None:
    result = edit(fenced(EXPECTED[1:]))
    assert result.rewards == [pytest.approx(1 - 1 / 4)]
    assert result.observations[0]["content"].startswith("Line 1 is wrong: it is missing")


def test_lines_that_belong_nowhere_are_damage() -> None:
    assert edit(fenced([*EXPECTED, "extra = 1"])).rewards == [pytest.approx(1 - 1 / 4)]
    assert edit(fenced(["junk = 1"] * 50)).rewards == [0.0]


@pytest.mark.parametrize(
    "text",
    [
        fenced(EXPECTED),
        "Sure! Here is the file:\n\n" + fenced(EXPECTED) + "\nAnything else?",
        "```ini\n" + "\n".join(EXPECTED),
        "Here it is:\n" + "\n".join(EXPECTED) + "\nI changed the limit.",
        "\n\n".join(f"  {line}  " for line in EXPECTED),
        fenced(EXPECTED).replace("\n", "\r\n"),
    ],
)
def test_fences_chatter_and_blank_lines_do_not_matter(text: str) -> None:
    assert edit(text).rewards == [1.0]


@pytest.mark.timeout(30)  # aligning all of its lines would be quadratic
def test_a_file_of_thousands_of_lines_is_judged_at_once() -> None:
    assert edit("a = 1\n" * 50_000).rewards == [0.0]


def test_a_second_turn_earns_only_its_improvement() -> None:
    first = edit(fenced([line.replace("25", "26") for line in EXPECTED]))
    worse = edit(fenced(ORIGINAL), first.metadata[0])
    second = edit(fenced(EXPECTED), worse.metadata[0])
    assert worse.rewards == [0.0]
    assert first.rewards[0] + second.rewards[0] == pytest.approx(1.0)


def test_one_of_two_changes_earns_half() -> None:
    state = FileEditState(expected=EXPECTED, changed=frozenset({1, 3}), request="")
    half = [line.replace("25", "80") for line in EXPECTED]
    assert edit(fenced(half), state).rewards == [0.5]


@settings(max_examples=50)
@given(
    turns=st.lists(
        st.lists(st.sampled_from([*EXPECTED, *ORIGINAL, "junk", "", "```"]), max_size=12),
        min_size=1,
        max_size=4,
    )
)
def test_the_rewards_of_a_trajectory_sum_to_its_best_score_within_zero_and_one(
    turns: list[list[str]],
) -> None:
    state, total = STATE, 0.0
    for lines in turns:
        result = edit("\n".join(lines), state)
        total += result.rewards[0]
        if result.terminateds[0]:
            break
        state = result.metadata[0]
        assert total == pytest.approx(state.best)
    assert 0.0 <= total <= 1.0


@pytest.mark.parametrize("fields", [{"lines_min": 9, "lines_max": 8}, {"changes": 8}, {"lines": 3}])
def test_file_edit_settings_that_cannot_be_met_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        FileEditConfig(**fields)


# Calculator


def test_a_tool_call_then_the_answer_earn_one_in_all() -> None:
    call = calc("Let me see. <calc>12*7")
    assert call.observations[0]["content"].startswith("The result is 84.")
    assert call.rewards == [0.1]
    assert call.next_stop_strings == [list(STOP_STRINGS)]
    answer = calc("<answer>84</answer>", call.metadata[0])
    assert answer.rewards == [pytest.approx(0.9)]
    assert answer.terminateds == [True]
    assert answer.answers == ["84"]


def test_only_the_first_tool_call_is_rewarded() -> None:
    call = calc("<calc>1+1</calc>")
    assert calc("<calc>1+1</calc>", call.metadata[0]).rewards == [0.0]


def test_a_wrong_answer_ends_the_episode_without_reward() -> None:
    result = calc("<answer>12*7 = 85</answer>")
    assert result.rewards == [0.0]
    assert result.terminateds == [True]
    assert result.next_stop_strings == [None]


@pytest.mark.parametrize("text", ["<answer>84", "<answer>12*7 = 84</answer>", "<answer> 84.0 </answer>"])
def test_an_answer_is_read_with_or_without_its_end_and_its_sum(text: str) -> None:
    assert calc(text).rewards == [1.0]


def test_the_first_action_of_a_turn_counts() -> None:
    assert calc("<calc>1+1</calc><answer>84</answer>").terminateds == [False]


@pytest.mark.parametrize(
    "text", ["", "84", "<calc>2**9999999</calc>", "<calc>__import__('os')</calc>", "<calc>1/0"]
)
def test_a_turn_without_a_valid_action_goes_on_without_reward(text: str) -> None:
    result = calc(text)
    assert result.rewards == [0.0]
    assert result.terminateds == [False]


def test_every_generated_task_knows_its_result() -> None:
    for task in CALC.tasks(1, 50):
        expression = task.messages[-1]["content"].split()[1]
        assert task.metadata.result == eval(expression)
        assert task.stop_strings == list(STOP_STRINGS)


@given(
    st.recursive(
        st.integers(0, 999).map(str),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
            lambda parts: f"({' '.join(parts)})"
        ),
        max_leaves=8,
    )
)
def test_the_calculator_agrees_with_python(expression: str) -> None:
    if len(expression) <= MAX_CHARACTERS:
        assert evaluate(expression) == eval(expression)


def test_precedence_signs_and_division_are_exact() -> None:
    assert evaluate("2+3*4-10/4") == Fraction(23, 2)
    assert evaluate("-(2 - 5) * --2 = ?") == 6
    assert evaluate("8-3-2") == 3
    assert evaluate("0.1+0.2") == Fraction(3, 10)


@pytest.mark.timeout(30)  # `9**9**9` would take all memory
@pytest.mark.parametrize(
    "text",
    [
        "",
        "(",
        "1 2",
        "1+",
        ")",
        "2^3",
        "(1",
        "1//2",
        "1/0",
        "x",
        "9**9**9",
        "(" * 120,
        "(" * 10_000,
        "1" * 10_000,
    ],
)
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        evaluate(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(84), "84"),
        (Fraction(1, 3), "0.333333"),
        (Fraction(-5, 2), "-2.5"),
        (Fraction(-1, 10**9), "0"),
    ],
)
def test_numbers_are_shown_as_a_person_writes_them(value: Fraction, text: str) -> None:
    assert show(value) == text
