"""Read a JSON schema: find a field by its path, say what it allows, give an example."""

from __future__ import annotations

import json
from typing import Any

from nemo_war.configuration.problems import nearest

Schema = dict[str, Any]

_NOUNS = {
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def find(root: Schema, location: tuple[str | int, ...]) -> Schema:
    """The schema at a path of keys and list positions; empty where it says nothing."""
    node = _inlined(root, root)
    for part in location:
        block = _not_null(node)
        if isinstance(part, str):
            inner = block.get("properties", {}).get(part, {})
        else:
            inner = dict(enumerate(block.get("prefixItems", []))).get(part, block.get("items", {}))
        node = _inlined(inner, root)
    return node


def keys(block: Schema) -> list[str]:
    """The keys a block may have."""
    return list(_not_null(block).get("properties", {}))


def describe(field: Schema) -> str:
    """What a field allows and what it is for."""
    purpose = "" if keys(field) else str(field.get("description", "")).rstrip(".")
    if not purpose:
        return _range(field)
    acronym = purpose[1:2].isupper()
    return f"{_range(field)} ({purpose if acronym else purpose[0].lower() + purpose[1:]})"


def example(field: Schema, instead_of: object = None) -> Any:
    """A value that the field allows, the nearest to `instead_of` among named ones; no whole block."""
    choices = _choices(field)
    if keys(field):
        return None
    if choices:
        alike = nearest(str(instead_of), map(str, choices))
        return next((choice for choice in choices if str(choice) == alike), choices[0])
    candidates = [field.get("default"), *field.get("examples", []), _not_null(field).get("minimum")]
    return next((value for value in candidates if value is not None), None)


def as_yaml(value: Any) -> str:
    """A value as a user writes it after `key=`."""
    return value if isinstance(value, str) else "..." if value is None else json.dumps(value)


def _range(field: Schema) -> str:
    if "anyOf" in field:
        return " or ".join(_range(branch) for branch in field["anyOf"])
    choices = _choices(field)
    if choices:
        return " or ".join(as_yaml(choice) for choice in choices)
    if "prefixItems" in field:
        return f"a list of {len(field['prefixItems'])}: {', '.join(map(_range, field['prefixItems']))}"
    if field.get("type") == "array":
        return f"a list of {_range(field['items'])}" + (", not empty" if field.get("minItems") else "")
    if "properties" in field:
        return f"a block of {', '.join(keys(field))}"
    bounds = [f"{word} {field[bound]}" for bound, word in _BOUNDS.items() if bound in field]
    return ", ".join([_NOUNS.get(field.get("type", ""), "a value"), *bounds])


def _choices(field: Schema) -> list[Any]:
    block = _not_null(field)
    return [block["const"]] if "const" in block else list(block.get("enum", []))


def _not_null(field: Schema) -> Schema:
    """A nullable field without its null."""
    branches = [branch for branch in field.get("anyOf", []) if branch.get("type") != "null"]
    return branches[0] if branches else field


def _inlined(field: Schema, root: Schema) -> Schema:
    """The field with references replaced, its own description and default kept."""
    if "anyOf" in field:
        return {**field, "anyOf": [_inlined(branch, root) for branch in field["anyOf"]]}
    if "$ref" in field:
        return {**root["$defs"][field["$ref"].rsplit("/", 1)[1]], **field}
    return field
