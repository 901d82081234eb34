"""Token sequences to try drafting on: recorded trajectories, and synthetic ones of any size.

A recorded trajectory is replayed by teacher forcing: walk the recorded response, draft
at each place, accept the longest prefix that equals what was recorded. The recordings
are tau-bench files (one JSON list), NeMo-Gym rollouts (one JSON object a line) and the
histories that our own runs keep.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_war.errors import UserError
from nemo_war.speculative.archive import FOLDER, SUFFIX, Sequence, read_archives

Encode = Callable[[str], list[int]]
SEGMENT = 40  # mean tokens that a synthetic trajectory copies or invents in one go
ASSISTANT = "<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One trajectory.

    Attributes:
        trajectory, group: names; the attempts at one task are a group.
        epoch: number of the attempt, which stands for a policy epoch.
        turns: pairs (int32[n] prompt tokens that are new in the turn, int32[m] response tokens).
    """

    trajectory: str
    group: str
    epoch: int
    turns: tuple[tuple[np.ndarray, np.ndarray], ...]


def read_trace(path: Path, encode: Encode) -> list[Recorded]:
    """All trajectories of a file, or of the trace files in a folder, epoch by epoch.

    A folder of one of our runs stands for the histories in it.

    Args:
        path: the file or folder.
        encode: text to tokens; not called for histories, which hold tokens.

    Raises:
        UserError: there is nothing to read, or something in it is of no known format.
    """
    if path.suffix == SUFFIX or (path / FOLDER).is_dir() or (path.is_dir() and any(path.glob(f"*{SUFFIX}"))):
        return [_from_history(each) for each in read_archives(path).rows()]
    if (path / "events.jsonl").exists():
        raise UserError(f"trace {path}: this run kept no history; name one that ran with WAR's drafts")
    if not path.is_dir():
        return read_recorded(path, encode)
    files = sorted(path.glob("*.json*"))
    if not files:
        raise UserError(f"trace {path}: no recording in this folder; name a file, or the folder of a run")
    recorded = [each for file in files for each in read_recorded(file, encode)]
    return sorted(recorded, key=lambda each: each.epoch)


def read_recorded(path: Path, encode: Encode) -> list[Recorded]:
    """All trajectories of a file, attempt by attempt.

    Raises:
        UserError: the file cannot be read or is of no known format.
    """
    try:
        text = path.read_text()
        if text.lstrip().startswith("["):
            recorded = [_from_tau_bench(path.stem, entry, encode) for entry in json.loads(text)]
        else:
            lines = [json.loads(line) for line in text.splitlines() if line.strip()]
            recorded = [_from_nemo_gym(path.stem, index, entry, encode) for index, entry in enumerate(lines)]
    except OSError as error:
        raise UserError(f"trace {path}: {error.strerror}; name a recorded file") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UserError(
            f"trace {path}: neither tau-bench nor NeMo-Gym ({error!r}); name such a file"
        ) from None
    return sorted(recorded, key=lambda each: each.epoch)


def _from_history(sequence: Sequence) -> Recorded:
    """A response is what was sampled in one go; given tokens behind the last one are no turn."""
    starts = np.flatnonzero(np.diff(sequence.sampled, prepend=False)).tolist()
    edges = [*starts, len(sequence.tokens)] if len(starts) % 2 else starts
    turns, at = [], 0
    for begin, end in zip(edges[0::2], edges[1::2], strict=True):
        turns.append((sequence.tokens[at:begin], sequence.tokens[begin:end]))
        at = end
    return Recorded(sequence.trajectory, sequence.group, sequence.epoch, tuple(turns))


def _from_tau_bench(stem: str, entry: dict[str, Any], encode: Encode) -> Recorded:
    messages = [(message["role"], _content_of(message)) for message in entry["traj"]]
    group = f"{stem}/{entry['task_id']}"
    return Recorded(f"{group}/{entry['trial']}", group, int(entry["trial"]), _turns(messages, encode))


def _content_of(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return content + "".join(_call_text(call["name"], call["arguments"]) for call in calls)


def _call_text(name: str, arguments: str) -> str:
    return f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _from_nemo_gym(stem: str, index: int, entry: dict[str, Any], encode: Encode) -> Recorded:
    """Attempts at one instance are a group; without an instance every rollout is its own."""
    request = entry["responses_create_params"]
    given = request["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    if not items:
        items = [{"role": "user", "content": (request.get("metadata") or {}).get("problem_statement", "")}]
    messages = [(item.get("role", "user"), _content_of(item)) for item in items]
    messages += [_from_item(item) for item in entry["response"]["output"]]
    instance = (request.get("metadata") or {}).get("instance_id")
    group = f"{stem}/{instance or index}"
    return Recorded(f"{stem}/{index}", group, index if instance else 0, _turns(messages, encode))


def _from_item(item: dict[str, Any]) -> tuple[str, str]:
    """(role, text) of one output item of the Responses API."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return "tool", str(item["output"])
    if kind == "function_call":
        return "assistant", _call_text(item["name"], item["arguments"])
    if kind == "reasoning":
        parts = item.get("summary") or item.get("content") or []
        return "assistant", "<think>" + "".join(part.get("text", "") for part in parts) + "</think>"
    return item.get("role", "assistant"), _content_of(item)


def _turns(messages: list[tuple[str, str]], encode: Encode) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """ChatML turns; assistant messages in a row are one response."""
    turns, prompt, response = [], "", ""

    def finish() -> None:
        nonlocal prompt, response
        if response:
            tokens = encode(prompt + ASSISTANT), encode(response + "<|im_end|>")
            turns.append((np.array(tokens[0], np.int32), np.array(tokens[1], np.int32)))
            prompt, response = "\n", ""

    for role, content in messages:
        if role == "assistant":
            response += content
        else:
            finish()
            prompt += f"<|im_start|>{role}\n{content}<|im_end|>\n"
    finish()
    return tuple(turns)


def synthetic_texts(
    seed: int, repetition: float = 0.8, substitution: float = 0.03, length: int = 2000, group: int = 8
) -> Iterator[tuple[str, np.ndarray]]:
    """Endless (group name, int32[length] tokens) of trajectories that repeat each other.

    A trajectory is made of segments of 40 tokens on average. One is copied, with probability
    `repetition`, from a random place of its own text or that of an earlier trajectory (of the
    same group in two of three cases), and each copied token is exchanged with probability
    `substitution`; else it is invented: tokens by Zipf's law over 32,000.

    Args:
        seed: makes it reproducible.
        repetition: share of segments that are copied.
        substitution: share of copied tokens that are exchanged.
        length: tokens of a trajectory.
        group: trajectories of a group.
    """
    rng = np.random.default_rng(seed)
    earlier: list[np.ndarray] = []
    number = 0
    while True:
        text = np.zeros(length, np.int32)
        siblings = earlier[len(earlier) - number % group :]
        at = 0
        while at < length:
            size = min(int(rng.geometric(1 / SEGMENT)), length - at)
            near = siblings if siblings and rng.random() < 2 / 3 else earlier
            source = near[int(rng.integers(len(near)))] if near and rng.random() < 0.9 else text[:at]
            segment = np.minimum(rng.zipf(1.2, size), 32_000).astype(np.int32)
            if len(source) > size and rng.random() < repetition:
                start = int(rng.integers(len(source) - size))
                segment = np.where(rng.random(size) < substitution, segment, source[start : start + size])
            text[at : at + size] = segment
            at += size
        yield f"group{number // group}", text
        earlier = [*earlier, text][-512:]
        number += 1
