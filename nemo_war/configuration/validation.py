"""Plain data → a pydantic model, or one line that says what to change.

What is allowed, and an example of it, are read off the model's JSON schema: the
bounds and the description beside a field are the only place where they are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from nemo_war.configuration.problems import nearest, raise_first
from nemo_war.configuration.schema import as_yaml, describe, example, find, keys
from nemo_war.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


class _Absent:
    def __repr__(self) -> str:
        return "<missing>"


def validate(data: Mapping[str, Any], model: type[Model], at: str = "") -> Model:
    """The data as an instance of `model`.

    Args:
        data: a configuration, or a block of one.
        model: what it has to be.
        at: dotted key of the block, for what is said of it.

    Raises:
        ConfigError: a key is unknown, missing, or its value not allowed.
    """
    try:
        # As JSON because strict Python input would want tuples and paths, and input
        # that is not strict takes `true` for 1 and `"3"` for 3.
        return model.model_validate_json(json.dumps(data, default=str), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)
    # A mistyped name is reported twice, as unknown and as missing; the former says more.
    found.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    schema = model.model_json_schema()
    raise_first(_explain(problem, schema, at) for problem in found)
    raise AssertionError("a ValidationError without errors")


def _explain(problem: Mapping[str, Any], schema: dict[str, Any], at: str) -> ConfigError:
    location: tuple[str | int, ...] = problem["loc"]
    key = _dotted((*filter(None, [at]), *location))
    if problem["type"] == "extra_forbidden":
        return _unknown(key, problem["input"], keys(find(schema, location[:-1])), str(location[-1]))
    field = find(schema, location)
    if problem["type"] == "missing":
        return ConfigError(
            key, _Absent(), f"allowed: {describe(field)}", f"add {key}: {as_yaml(example(field))}"
        )
    allowed = f"allowed: {describe(field)}"
    if problem["type"] == "value_error":
        allowed += f", but {problem['ctx']['error']}"
    return ConfigError(key, problem["input"], allowed, _fix(key, location, example(field, problem["input"])))


def _fix(key: str, location: tuple[str | int, ...], sample: Any) -> str:
    if sample is None:
        return f"correct {key}"
    if isinstance(location[-1], int):  # an override sets lists as a whole
        return f"write {as_yaml(sample)} there, for example"
    return f"set {key}={as_yaml(sample)}, for example"


def _unknown(key: str, value: Any, known: list[str], name: str) -> ConfigError:
    alike = nearest(name, known)
    block = key[: -len(name)]
    fix = f"did you mean {block}{alike}? rename or remove {key}" if alike else f"remove {key}"
    return ConfigError(key, value, f"unknown key; allowed: {', '.join(known)}", fix)


def _dotted(location: tuple[str | int, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
