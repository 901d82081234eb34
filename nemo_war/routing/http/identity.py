"""Who asks: the trajectory and the group of a request, as far as it says so itself.

In this order: a session header, the metadata of this package in the body, a session id
in the body. What is left is found out from the prompt, by `trajectories`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nemo_war.metadata import KEY, TurnMetadata

SESSION_HEADERS = ("x-nemo-war-trajectory", "x-session-id", "x-smg-routing-key")
"""Ours, then vLLM's and its router's, then SGLang's."""
GROUP_HEADER = "x-nemo-war-group"
TURN_HEADER = "x-nemo-war-turn"
"""What the router tells a replica of a turn: its metadata, as JSON."""
EPOCH_HEADER = "x-nemo-war-epoch"
"""What a replica of WAR's tells the router: the policy epoch under which an answer ended."""
_CARRIERS = ("vllm_xargs", "extra_args")
_SAMPLE = TurnMetadata("", "")
_LONGEST_NAME = 1024
"""Characters; each is remembered for as long as its trajectory."""
_NUMBERS = range(1 << 31)


@dataclass(frozen=True, slots=True)
class Announced:
    """What a request says of itself; None where it does not.

    Attributes:
        trajectory: name of the rollout.
        group: name of its siblings.
        metadata: all there is to know; its names are those above.
    """

    trajectory: str | None = None
    group: str | None = None
    metadata: TurnMetadata | None = None


def announced(headers: Mapping[str, str], fields: Mapping[str, Any]) -> Announced:
    """Read what a request says of itself.

    Args:
        headers: whose names compare without regard to case.
        fields: of the body.

    Raises:
        ValueError: its metadata is not what this version writes, or a name is too long.
    """
    found = _found(headers, fields)
    for name in (found.trajectory, found.group):
        if name is not None and len(name) > _LONGEST_NAME:
            raise ValueError(f"the name of a trajectory or a group is longer than {_LONGEST_NAME} characters")
    return found


def write_turn(turn: TurnMetadata) -> str:
    """The value of the turn's header; JSON escapes whatever a header must not hold."""
    return json.dumps(asdict(turn))


def read_turn(value: str) -> TurnMetadata | None:
    """What `write_turn` wrote; None where it is something else."""
    try:
        return _metadata("header", value)
    except ValueError:
        return None


def read_epoch(headers: Mapping[str, str]) -> int:
    """The policy epoch of an answer; 0 where it is not told, or makes no sense."""
    value = headers.get(EPOCH_HEADER, "")
    epoch = int(value) if value.isascii() and value.isdecimal() and len(value) < 10 else 0
    return epoch if epoch in _NUMBERS else 0


def _found(headers: Mapping[str, str], fields: Mapping[str, Any]) -> Announced:
    group = headers.get(GROUP_HEADER) or None
    for name in SESSION_HEADERS:
        if headers.get(name):
            return Announced(headers[name], group)
    for carrier in _CARRIERS:
        arguments = fields.get(carrier)
        if isinstance(arguments, Mapping) and arguments.get(KEY) is not None:
            metadata = _metadata(carrier, arguments[KEY])
            return Announced(metadata.trajectory, group or metadata.group, metadata)
    return Announced(_session_id(fields), group)


def _metadata(carrier: str, value: Any) -> TurnMetadata:
    """The metadata as an object, or as its JSON text: vLLM takes no objects in `vllm_xargs`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"{carrier}.{KEY} is neither an object nor JSON") from None
    metadata = TurnMetadata.from_extra_args({KEY: value})
    for name in TurnMetadata.__slots__:
        kind = type(getattr(_SAMPLE, name))
        if type(getattr(metadata, name, None)) is not kind:
            raise ValueError(f"{carrier}.{KEY}.{name} must be of type {kind.__name__}")
        if kind is int and getattr(metadata, name) not in _NUMBERS:
            raise ValueError(f"{carrier}.{KEY}.{name} must be from 0 to {_NUMBERS.stop - 1}")
    return metadata or _SAMPLE


def _session_id(fields: Mapping[str, Any]) -> str | None:
    """Where vLLM reads a session from, besides the header."""
    arguments = fields.get(_CARRIERS[0])
    in_arguments = arguments.get("session_id") if isinstance(arguments, Mapping) else None
    for value in (fields.get("session_id"), in_arguments):
        if isinstance(value, str) and value:
            return value
    return None
