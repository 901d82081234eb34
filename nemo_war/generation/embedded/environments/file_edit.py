"""File edit: print a small text file again with a few of its lines changed.

The answer is almost wholly a copy of the prompt, and of the previous turn's answer,
as when a coding agent rewrites a file. That is the text a suffix drafter drafts well. The prompt holds an
example edit of the very same file: at temperature 1 SmolLM2-135M copies a file it has
seen three times, while it wanders off when asked to copy one seen once.

A turn scores the share of the requested lines that are right, less the share of the
other lines that were damaged, within [0, 1]: an unchanged copy earns nothing. A
turn's *reward* is its improvement on the best earlier turn, so that a trajectory's
sum is its best score and lies within [0, 1] as well.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import zip_longest

from pydantic import Field, model_validator

from nemo_war.config import StrictModel
from nemo_war.generation.embedded.environments.interface import EnvironmentReturn, Message, MessageLog, Task

_NUMBERS = (
    "age", "batch", "count", "days", "delay", "depth", "height", "length", "level", "limit", "lines", "pages",
    "port", "price", "rate", "rooms", "score", "size", "speed", "steps", "timeout", "users", "volume",
    "weight", "width", "workers",
)  # fmt: skip
_NUMBER_RANGE = (2, 99)
_WORDS: dict[str, tuple[str, ...]] = {
    "backup": ("daily", "weekly", "never"),
    "color": ("red", "green", "blue", "black"),
    "debug": ("true", "false"),
    "format": ("json", "text", "table", "binary"),
    "fruit": ("apple", "lemon", "orange"),
    "language": ("english", "french", "latin"),
    "layout": ("grid", "list", "tree"),
    "mode": ("fast", "slow", "safe", "auto"),
    "order": ("first", "last", "random"),
    "region": ("north", "south", "east", "west"),
    "season": ("spring", "summer", "winter"),
    "shape": ("circle", "square", "line"),
    "status": ("open", "closed", "ready"),
    "style": ("bold", "plain", "italic"),
    "theme": ("dark", "light"),
    "type": ("public", "private"),
    "unit": ("meter", "inch", "mile"),
    "visible": ("true", "false"),
}

_LISTED_LINES = 4
"""Wrong lines named in an observation; more would make it longer than the file."""
_SHOWN_CHARACTERS = 40
"""Of a wrong line, so that a runaway line does not fill the context."""
_READ_FACTOR = 4
"""Lines read per expected line; comparing is quadratic and a model may print thousands."""

_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_FILE_LINE = re.compile(r"\w+\s*=.*")


class FileEditConfig(StrictModel):
    """`env.file_edit`."""

    lines_min: int = Field(8, ge=2, le=40, description="Fewest lines of a file; about 20 prompt tokens each.")
    lines_max: int = Field(9, ge=2, le=40, description="Most lines of a file.")
    changes: int = Field(1, ge=1, description="Lines the task asks to change.")

    @model_validator(mode="after")
    def _consistent(self) -> FileEditConfig:
        if self.lines_min > self.lines_max:
            raise ValueError(f"lines_min ({self.lines_min}) must not exceed lines_max ({self.lines_max})")
        if self.changes >= self.lines_min:
            raise ValueError(f"changes ({self.changes}) must be below lines_min ({self.lines_min})")
        return self


@dataclass(frozen=True)
class FileEditState:
    """What the environment remembers of a trajectory.

    Attributes:
        expected: the lines of the file as it should be printed.
        changed: positions in `expected` that differ from the file shown.
        request: what the task asked for, to be asked again.
        best: best score of the turns so far.
    """

    expected: tuple[str, ...]
    changed: frozenset[int]
    request: str
    best: float = 0.0


@dataclass(frozen=True)
class Judgement:
    """One printed file compared with the expected one.

    Attributes:
        score: within [0, 1].
        wrong: (position in the expected file, what was found there or None if nothing).
        surplus: printed lines that belong nowhere.
    """

    score: float
    wrong: tuple[tuple[int, str | None], ...]
    surplus: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether the file was printed exactly."""
        return not self.wrong and not self.surplus


class FileEditEnvironment:
    """Seeded edit tasks; the job's `max_rollout_turns` bounds the attempts."""

    def __init__(self, config: FileEditConfig) -> None:
        self._config = config

    def tasks(self, seed: int, count: int) -> list[Task]:
        """`count` tasks, a pure function of the seed; fewer are a prefix of more."""
        return [self._task(seed, index) for index in range(count)]

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[FileEditState]
    ) -> EnvironmentReturn:
        """Judge the file printed by the last message of each log."""
        printed = [
            read_file(log[-1]["content"], state)
            for log, state in zip(message_log_batch, metadata, strict=True)
        ]
        judged = [judge(lines, state) for lines, state in zip(printed, metadata, strict=True)]
        best = [max(state.best, verdict.score) for state, verdict in zip(metadata, judged, strict=True)]
        return EnvironmentReturn(
            observations=[
                _observation(verdict, state) for verdict, state in zip(judged, metadata, strict=True)
            ],
            metadata=[
                None if verdict.right else replace(state, best=score)
                for state, verdict, score in zip(metadata, judged, best, strict=True)
            ],
            next_stop_strings=[None] * len(judged),
            rewards=[score - state.best for state, score in zip(metadata, best, strict=True)],
            terminateds=[verdict.right for verdict in judged],
            answers=["\n".join(lines) for lines in printed],
        )

    def _task(self, seed: int, index: int) -> Task:
        rng = random.Random(f"file_edit/{seed}/{index}")
        settings = _settings(rng, rng.randint(self._config.lines_min, self._config.lines_max))
        line = rng.choice((_config_line, _code_line))
        shown = [line(key, value) for key, value in settings]
        # One position more than asked for: the edit shown as an example.
        example, *asked = rng.sample(range(len(settings)), self._config.changes + 1)
        edits = {
            at: line(settings[at][0], _other_value(rng, *settings[at])) for at in (example, *sorted(asked))
        }
        expected = tuple(edits[at] if at in asked else text for at, text in enumerate(shown))
        request = _request(shown, edits, sorted(asked))
        return Task(
            name=f"file_edit-{seed}-{index}",
            messages=[
                {"role": "system", "content": "You edit files."},
                {"role": "user", "content": _request(shown, edits, [example])},
                {
                    "role": "assistant",
                    "content": _fenced([*shown[:example], edits[example], *shown[example + 1 :]]),
                },
                {"role": "user", "content": request},
            ],
            metadata=FileEditState(expected, frozenset(asked), request),
        )


def read_file(text: str, state: FileEditState) -> list[str]:
    """The lines of the file in a model's answer, without blank lines and indentation.

    The first fenced block is the file; without one, everything from the first to the
    last line that could stand in such a file, as small models chat before and after.
    """
    fenced = _FENCED.search(text)
    lines = [line.strip() for line in (fenced.group(1) if fenced else text).splitlines()]
    lines = [line for line in lines if line]
    if not fenced:
        plausible = [at for at, line in enumerate(lines) if _FILE_LINE.fullmatch(line)]
        lines = lines[plausible[0] : plausible[-1] + 1] if plausible else []
    return lines[: _READ_FACTOR * len(state.expected)]


def judge(printed: Sequence[str], state: FileEditState) -> Judgement:
    """Align the printed lines with the expected ones and score them.

    Lines are aligned rather than compared by number, so that one line left out costs
    one line and not all that follow it.
    """
    wrong: list[tuple[int, str | None]] = []
    surplus: list[str] = []
    matcher = SequenceMatcher(None, state.expected, printed, autojunk=False)
    for tag, first, last, found_first, found_last in matcher.get_opcodes():
        if tag == "equal":
            continue
        for position, found in zip_longest(range(first, last), printed[found_first:found_last]):
            if position is None:
                surplus.append(str(found))
            else:
                wrong.append((position, found))
    missed = sum(position in state.changed for position, _ in wrong)
    damaged = len(wrong) - missed + len(surplus)
    credit = 1.0 - missed / len(state.changed)
    penalty = damaged / (len(state.expected) - len(state.changed))
    return Judgement(max(0.0, credit - penalty), tuple(wrong), tuple(surplus))


def _settings(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """`count` (key, value) pairs with distinct keys, sorted as configuration files often are."""
    keys = sorted(rng.sample([*_NUMBERS, *_WORDS], count))
    return [(key, _other_value(rng, key, "")) for key in keys]


def _other_value(rng: random.Random, key: str, current: str) -> str:
    """A value that suits the key and is not the current one."""
    values = _WORDS.get(key) or [str(number) for number in range(_NUMBER_RANGE[0], _NUMBER_RANGE[1] + 1)]
    return rng.choice([value for value in values if value != current])


def _config_line(key: str, value: str) -> str:
    return f"{key} = {value}"


def _code_line(key: str, value: str) -> str:
    return f"{key} = {value if value.isdecimal() else repr(value)}"


def _request(lines: Sequence[str], edits: Mapping[int, str], asked: Sequence[int]) -> str:
    changes = " ".join(f"Change `{lines[at]}` to `{edits[at]}`." for at in asked)
    return f"{_fenced(lines)}\n{changes} Print the whole file."


def _fenced(lines: Sequence[str]) -> str:
    return "\n".join(("```", *lines, "```"))


def _observation(verdict: Judgement, state: FileEditState) -> Message:
    """Which lines are wrong and what stood there, and the request again.

    What should have stood there is told no more than the task told it.
    """
    if verdict.right:
        return {"role": "user", "content": "All lines are right."}
    notes = [f"Line {at + 1} is wrong: {_clipped(found)}" for at, found in verdict.wrong]
    notes += [f"This line does not belong: {_clipped(line)}" for line in verdict.surplus]
    hidden = len(notes) - _LISTED_LINES
    listed = notes[:_LISTED_LINES] + ([f"And {hidden} more."] if hidden > 0 else [])
    return {"role": "user", "content": "\n".join([*listed, "Try again.", state.request])}


def _clipped(line: str | None) -> str:
    return "it is missing" if line is None else f"`{line[:_SHOWN_CHARACTERS]}`"
