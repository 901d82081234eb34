"""The contract with NeMo-RL says what is missing in an installation, in a line each."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from types import ModuleType, SimpleNamespace
from typing import Any, TypedDict

import pytest

from nemo_war.generation.nemo_rl import contract
from nemo_war.generation.nemo_rl.facts.fact import Asks, Fact, Kind


def fact(name: str, kind: Kind, **more: Any) -> Fact:
    return Fact(f"theirs:{name}", kind, "it is there", "it is used", **more)


def hiding(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def naming(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(hiding(function))


class Block(TypedDict):
    key: int


class Theirs:
    def __init__(self, config: Any, extra: int = 0) -> None:
        self.config = config

    @property
    def size(self) -> int:
        return 0

    @staticmethod
    def still(first: int) -> None:
        pass

    @classmethod
    def made(cls, first: int) -> None:
        pass

    def plain(self, first: int, second: int = 0, *, third: int = 0) -> None:
        pass

    def demanding(self, first: int, second: int, *rest: int, third: int) -> None:
        pass

    async def waits(self) -> None:
        pass

    async def yields(self) -> AsyncIterator[int]:
        yield 0

    @hiding
    def hidden(self, first: int) -> None:
        self.late = first

    @naming
    def wrapped(self, first: int) -> None:
        pass


class Later(Theirs):
    pass


THEIRS = ModuleType("theirs")
vars(THEIRS).update(Theirs=Theirs, Later=Later, Block=Block, NAME=1, act=SimpleNamespace(remote=None))

HOLD = [
    fact("Theirs", Kind.CLASS),
    fact("act", Kind.ACTOR),
    fact("NAME", Kind.CONSTANT),
    fact("Block.key", Kind.KEY),
    fact("Theirs.size", Kind.PROPERTY),
    fact("Later.config", Kind.ATTRIBUTE),
    fact("Later.late", Kind.ATTRIBUTE),
    fact("Theirs", Kind.FUNCTION, parameters=("config",)),
    fact("Theirs.__init__", Kind.METHOD, parameters=("config",)),
    fact("Theirs.still", Kind.METHOD, parameters=("first",), overridden=True),
    fact("Theirs.made", Kind.METHOD, parameters=("first",), overridden=True),
    fact("Later.plain", Kind.METHOD, parameters=("first",)),
    fact("Later.plain", Kind.METHOD, parameters=("first", "second", "third="), overridden=True),
    fact("Theirs.demanding", Kind.METHOD, parameters=("first", "second", "*rest", "third=")),
    fact("Theirs.waits", Kind.METHOD, asks=Asks.COROUTINE),
    fact("Theirs.yields", Kind.METHOD, asks=Asks.GENERATOR),
    fact("Theirs.hidden", Kind.METHOD, parameters=("first",), overridden=True),
    fact("Theirs.wrapped", Kind.METHOD, parameters=("first",), overridden=True),
]
DO_NOT = [
    (fact("Gone", Kind.CLASS), "no such class"),
    (fact("NAME", Kind.CLASS), "no such class"),
    (fact("Theirs", Kind.ACTOR), "no such Ray actor"),
    (fact("GONE", Kind.CONSTANT), "no such name"),
    (fact("Block.gone", Kind.KEY), "no such key"),
    (fact("Gone.key", Kind.KEY), "no such key"),
    (fact("Theirs.plain", Kind.PROPERTY), "no such property"),
    (fact("Theirs.gone", Kind.ATTRIBUTE), "no method sets it"),
    (fact("Gone.gone", Kind.ATTRIBUTE), "no method sets it"),
    (fact("Theirs.gone", Kind.METHOD), "no such method"),
    (fact("Gone.gone", Kind.METHOD), "no such method"),
    (fact("gone", Kind.FUNCTION), "no such function"),
    (fact("NAME", Kind.FUNCTION), "no such function"),
    (fact("Theirs.plain", Kind.METHOD, parameters=("renamed",)), "first, second, third"),
    (fact("Theirs.plain", Kind.METHOD, parameters=("second", "first")), "first, second, third"),
    (fact("Theirs.plain", Kind.METHOD, parameters=("first", "fourth=")), "passed (first, fourth=)"),
    (fact("Theirs.plain", Kind.METHOD, parameters=("first",), overridden=True), "ours no more than (first)"),
    (fact("Theirs.demanding", Kind.METHOD, parameters=("first",)), "passed (first)"),
    (fact("Theirs.demanding", Kind.METHOD, parameters=("first", "second")), "passed (first, second)"),
    (fact("Theirs.hidden", Kind.METHOD, parameters=("other",)), "takes (first)"),
    (fact("Theirs.waits", Kind.METHOD), "is a coroutine, and is used as a plain function"),
    (fact("Theirs.waits", Kind.METHOD, asks=Asks.GENERATOR), "used as an asynchronous generator"),
    (fact("Theirs.made", Kind.METHOD, parameters=("first",), asks=Asks.COROUTINE), "is a plain function"),
]


@pytest.mark.parametrize("known", HOLD, ids=str)
def test_what_is_there_is_no_problem(known: Fact) -> None:
    assert known.problem(THEIRS) is None


@pytest.mark.parametrize(("wrong", "says"), DO_NOT, ids=str)
def test_what_is_not_there_or_not_so_is_said_in_a_line(wrong: Fact, says: str) -> None:
    problem = wrong.problem(THEIRS)
    assert problem is not None
    assert problem.startswith(f"{wrong.name}: ")
    assert says in problem
    assert "\n" not in problem


def test_a_module_that_is_not_there_has_one_line() -> None:
    def importer(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    problems = contract.check(importer)
    assert len(problems) == len({known.module for known in contract.FACTS})
    assert "nemo_rl.utils.config: cannot be imported: ModuleNotFoundError" in " ".join(problems)


def test_every_fact_has_a_name_of_nemo_rls_and_says_what_it_is_for() -> None:
    for known in contract.FACTS:
        assert known.name.startswith("nemo_rl."), known.name
        assert ":" in known.name, known.name
        assert known.relied, known.name
        assert known.why, known.name
    names = [known.name for known in contract.FACTS]
    assert len(names) == len(set(names))
