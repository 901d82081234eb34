"""Damage to bytes and to JSON: small, so that parsers get far, or absurd, so that they see all of it once."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

NUMBERS = (
    0, -1, 1, 7, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64,
    -(2**63) - 1, 10**30, 10**400, -0.0, 0.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "", "a", "\0", "\n", "\ud800", "ü", "\u202e", "../../etc/passwd", "/etc/passwd", ".", "x" * 3000,
    "1", "-1", "1e9", "true", "{}", "data: [DONE]", "\x1b[2J", "a/b", "😀" * 50,
)  # fmt: skip
NESTED = 100_000
"""Deeper than any parser goes."""


def value(chance: random.Random, depth: int = 3) -> Any:
    """Any JSON value."""
    kind = chance.randrange(8 if depth else 5)
    if kind <= 1:
        return chance.choice(NUMBERS)
    if kind == 2:
        return chance.choice(TEXTS)
    if kind == 3:
        return chance.choice((None, True, False))
    if kind == 4:
        return chance.choice(([], {}, [[]], {"": None}))
    if kind <= 6:
        return [value(chance, depth - 1) for _ in range(chance.randrange(5))]
    return {chance.choice(TEXTS): value(chance, depth - 1) for _ in range(chance.randrange(4))}


def changed(chance: random.Random, tree: Any) -> Any:
    """A JSON value with something in it replaced, removed, doubled or renamed; it is copied for that."""
    if isinstance(tree, dict) and tree and chance.random() < 0.9:
        key = chance.choice(list(tree))
        copy = dict(tree)
        match chance.randrange(8):
            case 0:
                del copy[key]
            case 1:
                copy[chance.choice(TEXTS)] = copy.pop(key)
            case 2:
                copy[key] = tree[chance.choice(list(tree))]
            case _:
                copy[key] = changed(chance, tree[key])
        return copy
    if isinstance(tree, list | tuple) and tree and chance.random() < 0.9:
        place = chance.randrange(len(tree))
        copy = list(tree)
        match chance.randrange(6):
            case 0:
                del copy[place]
            case 1:
                copy.insert(place, copy[chance.randrange(len(copy))])
            case 2:
                copy[place] = value(chance)
            case _:
                copy[place] = changed(chance, tree[place])
        return copy
    return value(chance)


def dumped(chance: random.Random, tree: Any) -> bytes:
    """Its text; once in a while not quite."""
    text = json.dumps(tree).encode()
    return damaged(chance, text, (text,)) if chance.random() < 0.1 else text


def damaged(chance: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    """The bytes with a few things done to them."""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        content = _damaged_once(chance, content, others)
    return content


def _damaged_once(chance: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    at = chance.randrange(len(content) + 1)
    end = min(len(content), at + chance.choice((1, 1, 4, 16, 200, 5000)))
    match chance.randrange(9):
        case 0 | 1 if at < len(content):
            return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
        case 2:
            return content[:at] + chance.randbytes(end - at) + content[end:]
        case 3:
            return content[:at]
        case 4:
            return content[:at] + content[end:]
        case 5:
            return content[:end] + content[at:]
        case 6:
            other = chance.choice(others)
            return content[:at] + other[chance.randrange(len(other) + 1) :]
        case 7:
            return _renumbered(chance, content)
        case _:
            piece = chance.choice(
                (b"[" * NESTED, b'"\\ud800"', b"NaN", b"\0", b"\n", b"\r\n\r\n", b'{"":' * 500)
            )
            return content[:at] + piece + content[at:]


def _renumbered(chance: random.Random, content: bytes) -> bytes:
    """One of the first numbers in it is another one."""
    found = list(re.finditer(rb"-?\d+", content[:4000]))
    if not found:
        return content
    number = chance.choice(found)
    return content[: number.start()] + str(chance.choice(NUMBERS)).encode() + content[number.end() :]
