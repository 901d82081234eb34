from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_war.errors import ConfigError
from nemo_war.generation.embedded.environments import build
from nemo_war.generation.embedded.environments.arithmetic import evaluate
from nemo_war.generation.embedded.environments.calculator import CalculatorConfig
from nemo_war.generation.embedded.environments.file_edit import FileEditConfig
from nemo_war.generation.embedded.environments.interface import Environment, EnvironmentReturn, Task

FILES = build("file_edit", FileEditConfig(lines_min=6, lines_max=9, changes=1))
SUMS = build("calculator", CalculatorConfig(operands=3, max_operand=99))
BOTH = pytest.mark.parametrize("environment", [FILES, SUMS], ids=["file_edit", "calculator"])


def say(environment: Environment, task: Task, text: str, metadata: object = None) -> EnvironmentReturn:
    log = [*task.messages, {"role": "assistant", "content": text}]
    return environment.step([log], [metadata or task.metadata])


def shown(task: Task) -> list[str]:
    """The file as the task shows it: its expected lines with the change undone."""
    state = task.metadata
    text = "\n".join(message["content"] for message in task.messages)
    lines = list(state.expected)
    for position in state.changed:
        key = lines[position].split(" = ")[0]
        candidates = [line for line in text.splitlines() if line.startswith(f"{key} = ")]
        lines[position] = next(line for line in candidates if line != state.expected[position])
    return lines


@BOTH
def test_tasks_are_a_function_of_the_seed_and_fewer_are_a_prefix_of_more(environment: Environment) -> None:
    assert environment.tasks(7, 5) == environment.tasks(7, 5)
    assert environment.tasks(7, 3) == environment.tasks(7, 5)[:3]
    assert environment.tasks(8, 3) != environment.tasks(7, 3)
    assert len({task.name for task in environment.tasks(7, 50)}) == 50


@BOTH
@given(text=st.text(max_size=400))
def test_no_text_of_a_model_makes_an_environment_fail(environment: Environment, text: str) -> None:
    result = say(environment, environment.tasks(1, 1)[0], text)
    assert 0 <= result.rewards[0] <= 1
    assert result.observations[0]["role"] == "user"


def test_the_right_file_earns_everything_and_ends_the_trajectory() -> None:
    for task in FILES.tasks(3, 20):
        result = say(FILES, task, "```\n" + "\n".join(task.metadata.expected) + "\n```")
        assert (result.rewards, result.terminateds, result.metadata) == ([1.0], [True], [None])


def test_a_mere_copy_earns_nothing() -> None:
    for task in FILES.tasks(3, 20):
        result = say(FILES, task, "```\n" + "\n".join(shown(task)) + "\n```")
        assert (result.rewards, result.terminateds) == ([0.0], [False])


def test_a_damaged_line_costs_part_of_the_reward() -> None:
    task = FILES.tasks(3, 1)[0]
    lines = list(task.metadata.expected)
    damaged = next(at for at in range(len(lines)) if at not in task.metadata.changed)
    lines[damaged] = "nonsense = 1"
    assert 0 < say(FILES, task, "\n".join(lines)).rewards[0] < 1


def test_one_line_left_out_costs_one_line() -> None:
    task = FILES.tasks(3, 1)[0]
    left_out = next(at for at in range(len(task.metadata.expected)) if at not in task.metadata.changed)
    lines = [line for at, line in enumerate(task.metadata.expected) if at != left_out]
    assert say(FILES, task, "\n".join(lines)).rewards[0] > 0.7


def test_chatter_around_the_file_is_overlooked() -> None:
    task = FILES.tasks(3, 1)[0]
    text = "Here is the file:\n\n" + "\n".join(task.metadata.expected) + "\n\nLet me know if it helps."
    assert say(FILES, task, text).rewards == [1.0]


def test_the_observation_names_the_wrong_line_and_asks_again() -> None:
    task = FILES.tasks(3, 1)[0]
    said = say(FILES, task, "\n".join(shown(task))).observations[0]["content"]
    (changed,) = task.metadata.changed
    assert f"ine {changed + 1} is wrong" in said
    assert said.endswith("Print the whole file.")


def test_a_better_second_attempt_earns_the_difference() -> None:
    task = FILES.tasks(3, 1)[0]
    lines = list(task.metadata.expected)
    damaged = next(at for at in range(len(lines)) if at not in task.metadata.changed)
    first = say(FILES, task, "\n".join([*lines[:damaged], "nonsense = 1", *lines[damaged + 1 :]]))
    second = say(FILES, task, "\n".join(lines), first.metadata[0])
    assert first.rewards[0] + second.rewards[0] == pytest.approx(1.0)


@pytest.mark.timeout(30)  # comparing line by line would be quadratic
def test_a_file_of_thousands_of_lines_is_judged_at_once() -> None:
    say(FILES, FILES.tasks(3, 1)[0], "a = 1\n" * 50_000)


def test_the_calculator_answers_and_the_right_answer_earns_one_in_all() -> None:
    task = SUMS.tasks(5, 1)[0]
    called = say(SUMS, task, "<calc>12*7")
    assert "84" in called.observations[0]["content"]
    assert called.rewards == [0.1]
    again = say(SUMS, task, "<calc>12*7</calc>", called.metadata[0])
    assert again.rewards == [0.0]
    answered = say(SUMS, task, f"<answer>{task.metadata.result}</answer>", again.metadata[0])
    assert answered.rewards == [pytest.approx(0.9)]
    assert answered.terminateds == [True]


def test_a_wrong_answer_ends_the_trajectory_without_reward() -> None:
    task = SUMS.tasks(5, 1)[0]
    result = say(SUMS, task, f"<answer>{task.metadata.result + 1}</answer>")
    assert (result.rewards, result.terminateds) == ([0.0], [True])


def test_turns_of_the_calculator_end_at_stop_strings() -> None:
    task = SUMS.tasks(5, 1)[0]
    assert task.stop_strings == ["</calc>", "</answer>"]
    assert say(SUMS, task, "<calc>1+1</calc>").next_stop_strings == [["</calc>", "</answer>"]]


@pytest.mark.parametrize(("expression", "value"), [("1+2*3", 7), ("(1+2)*3", 9), ("-4/8", -0.5), ("2--3", 5)])
def test_expressions_follow_the_rules_of_arithmetic(expression: str, value: float) -> None:
    assert float(evaluate(expression)) == value


@pytest.mark.timeout(30)  # `9**9**9` would take all memory
@pytest.mark.parametrize(
    "expression", ["", "1+", "__import__('os')", "9**9**9", "1/0", "(" * 10_000, "1" * 10_000, "a+1"]
)
def test_what_is_no_small_sum_is_refused_quickly(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        evaluate(expression)


def test_an_unknown_environment_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="file_edit"):
        build("chess", None)
