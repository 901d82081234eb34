"""What is relied on of another package, one name at a time, and whether an installation has it."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any


class Kind(StrEnum):
    """What a name stands for.

    An attribute is one that methods set on their object, a key one of a block of the configuration.
    """

    CLASS = "class"
    ACTOR = "actor"
    METHOD = "method"
    FUNCTION = "function"
    PROPERTY = "property"
    ATTRIBUTE = "attribute"
    CONSTANT = "constant"
    KEY = "key"


class Asks(StrEnum):
    """How a function is to be asked for its answer."""

    CALL = "a plain function"
    COROUTINE = "a coroutine"
    GENERATOR = "an asynchronous generator"


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that is relied on.

    Attributes:
        name: module, colon, names in it with dots.
        kind: what it is.
        relied: what is relied on.
        why: what for.
        parameters: those that are passed, in this order and before all others. `name=` stands for one that is
            passed by name; then its place does not matter.
        overridden: one of ours stands in its place, so that it must take nothing else.
        asks: how it answers.
    """

    name: str
    kind: Kind
    relied: str
    why: str
    parameters: tuple[str, ...] = ()
    overridden: bool = False
    asks: Asks = Asks.CALL

    @property
    def module(self) -> str:
        """Where it is."""
        return self.name.partition(":")[0]

    def problem(self, module: ModuleType) -> str | None:
        """What of this does not hold in a module; None where all does."""
        *path, name = self.name.partition(":")[2].split(".")
        owner: Any = module
        for part in path:
            owner = getattr(owner, part, None)
        complaint = _COMPLAINTS[self.kind](self, owner, name)
        return f"{self.name}: {complaint}" if complaint else None


def _class(fact: Fact, owner: Any, name: str) -> str | None:
    return None if inspect.isclass(getattr(owner, name, None)) else "there is no such class"


def _actor(fact: Fact, owner: Any, name: str) -> str | None:
    return None if hasattr(getattr(owner, name, None), "remote") else "there is no such Ray actor"


def _property(fact: Fact, owner: Any, name: str) -> str | None:
    found = inspect.getattr_static(owner, name, None)
    return None if isinstance(found, property) else "there is no such property"


def _attribute(fact: Fact, owner: Any, name: str) -> str | None:
    return None if name in _set_by_methods(owner) else "no method sets it"


def _constant(fact: Fact, owner: Any, name: str) -> str | None:
    return None if hasattr(owner, name) else "there is no such name"


def _key(fact: Fact, owner: Any, name: str) -> str | None:
    kinds = ("__required_keys__", "__optional_keys__", "model_fields", "__dataclass_fields__")
    return None if any(name in getattr(owner, kind, ()) for kind in kinds) else "the block has no such key"


def _function(fact: Fact, owner: Any, name: str) -> str | None:
    found = inspect.getattr_static(owner, name, None)
    if not callable(getattr(owner, name, None)):
        return f"there is no such {fact.kind}"
    bound = inspect.isclass(owner) and not isinstance(found, staticmethod)
    try:
        function = _undecorated(getattr(found, "__func__", found))
        parameters = _parameters(function)[bound:]
    except (TypeError, ValueError) as error:  # Python cannot say what it takes
        return str(error)
    return _other_parameters(fact, parameters) or _other_way(fact, function)


_COMPLAINTS: dict[Kind, Callable[[Fact, Any, str], str | None]] = {
    Kind.CLASS: _class,
    Kind.ACTOR: _actor,
    Kind.METHOD: _function,
    Kind.FUNCTION: _function,
    Kind.PROPERTY: _property,
    Kind.ATTRIBUTE: _attribute,
    Kind.CONSTANT: _constant,
    Kind.KEY: _key,
}


def _other_parameters(fact: Fact, parameters: list[inspect.Parameter]) -> str | None:
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [stars.get(each.kind, "") + each.name for each in parameters]
    placed = [name for name in fact.parameters if not name.endswith("=")]
    named = [name.removesuffix("=") for name in fact.parameters if name.endswith("=")]
    demanded = [each.name for each in parameters if each.kind not in stars and each.default is each.empty]
    passed = {*placed, *named}
    if names[: len(placed)] == placed and passed <= {*names}:
        if fact.overridden and len(names) > len(passed):
            return f"takes ({', '.join(names)}), and ours no more than ({', '.join(fact.parameters)})"
        if passed >= {*demanded}:
            return None
    return f"takes ({', '.join(names)}), and is passed ({', '.join(fact.parameters)})"


def _other_way(fact: Fact, function: Callable[..., Any]) -> str | None:
    found = Asks.CALL
    if inspect.iscoroutinefunction(function):
        found = Asks.COROUTINE
    elif inspect.isasyncgenfunction(function):
        found = Asks.GENERATOR
    return None if found is fact.asks else f"is {found}, and is used as {fact.asks}"


def _undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a decorator wrapped that does not say so, as NeMo-RL's for NVTX ranges does not."""
    function = inspect.unwrap(function)
    kinds = [each.kind for each in _parameters(function)]
    if kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        inner = [each for each in held if inspect.isfunction(each)]
        if len(inner) == 1:
            return inner[0]
    return function


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Without the one that Ray adds to the methods of a class that it makes an actor of."""
    parameters = inspect.signature(function).parameters.values()
    return [each for each in parameters if each.name != "_ray_trace_ctx"]


def _set_by_methods(owner: Any) -> set[str]:
    def names() -> Iterator[str]:
        for cls in getattr(owner, "__mro__", ()):
            for function in filter(inspect.isfunction, vars(cls).values()):
                for step in dis.get_instructions(_undecorated(function)):
                    if step.opname == "STORE_ATTR":
                        yield step.argval

    return set(names())
