"""What classes offer, read from their source: public members, and the parameters of methods.

A program of its own for `test_fake_engine`: CPython 3.11's `ast.parse` fails now and then in a process that
has other threads ("AST constructor recursion depth mismatch"), and this one has none.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

Interface = dict[str, list[str]]


def interfaces(wanted: Iterable[tuple[Path, str]]) -> list[Interface]:
    """Of classes, each given by its file and the end of its name."""
    arguments = [str(part) for pair in wanted for part in pair]
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def interface(path: Path, ending: str) -> Interface:
    """Of the first class in a file whose name ends so."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name.endswith(ending):
            break
    else:
        raise AssertionError(f"{path} has no {ending}")
    members: Interface = {}
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = {argument.arg for argument in (*each.args.args, *each.args.kwonlyargs)}
            members |= {name: [] for name in attributes(each)}
            members[each.name] = sorted(parameters - {"self", "cls"})
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            members[each.target.id] = []
    return {name: parameters for name, parameters in members.items() if not name.startswith("_")}


def attributes(method: ast.AST) -> set[str]:
    """What a method sets on its object."""
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


if __name__ == "__main__":
    pairs = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    print(json.dumps([interface(Path(path), ending) for path, ending in pairs]))
