"""Damage to a checkpoint, and whether one is whole: by its own digests, without the code that reads it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from random import Random

from tools.chaos_bench.run_plan import Damage

_INFO = "training_info.json"


def checkpoints(folder: Path) -> list[Path]:
    """Those in a folder, by age."""
    found = [path for path in folder.glob("step_*") if path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def weights_digest(checkpoint: Path) -> str:
    """That of the weights that it has, as it says."""
    return json.loads((checkpoint / _INFO).read_text())["weights_digest"]


def damaged(checkpoint: Path) -> list[str]:
    """What is wrong with it, in sentences."""
    try:
        listed = json.loads((checkpoint / _INFO).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return [f"{checkpoint.name}/{_INFO}: {type(error).__name__}"]
    present = {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    wrong = [f"{checkpoint.name}: {name} is not its own" for name in present - {*listed, _INFO}]
    for name, facts in listed.items():
        path = checkpoint / name
        if not path.is_file() or hashlib.blake2b(path.read_bytes()).hexdigest() != facts["blake2b"]:
            wrong.append(f"{checkpoint.name}: {name} is damaged")
    return wrong


def damage(checkpoint: Path, how: Damage, draw: Random, other: Path) -> str:
    """Do it to one of its files; returns that file's name.

    Args:
        checkpoint: whose.
        how: what is done.
        draw: chooses the file, and where.
        other: a checkpoint that another one's files are taken from.
    """
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    victim = draw.choice(files)
    if how == "add":
        victim = checkpoint / "war" / "replica-9.state"
        victim.write_bytes(next(iter(sorted(other.glob("war/*.state")))).read_bytes())
    elif how == "swap":
        unlike = [path for path in files if _twin(path, checkpoint, other) not in (None, path.read_bytes())]
        victim = draw.choice(unlike)
        victim.write_bytes((other / victim.relative_to(checkpoint)).read_bytes())
    elif how == "delete":
        victim.unlink()
    else:
        content = bytearray(victim.read_bytes())
        place = draw.randrange(len(content))
        if how == "cut":
            del content[place:]
        else:
            content[place] ^= 1 << draw.randrange(8)
        victim.write_bytes(content)
    return str(victim.relative_to(checkpoint))


def print_of(folder: Path) -> dict[str, str]:
    """All that is in a folder, to see whether it was touched."""
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _twin(path: Path, checkpoint: Path, other: Path) -> bytes | None:
    twin = other / path.relative_to(checkpoint)
    return twin.read_bytes() if twin.is_file() else None
