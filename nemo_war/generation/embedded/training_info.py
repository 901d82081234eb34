"""`training_info.json`: what a checkpoint is, and how to know that it is whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field

from nemo_war import __version__
from nemo_war.config import StrictModel
from nemo_war.errors import UserError
from nemo_war.generation.embedded.config import RunConfig

FILE_NAME = "training_info.json"
_FORMAT, _VERSION = "nemo_war checkpoint", 1
_MOST_BYTES = 1 << 20
_MUST_AGREE = (
    "policy.model_name",
    "policy.tokenizer.name",
    "grpo.seed",
    "grpo.num_prompts_per_step",
    "data.num_prompts",
    "env",
)
"""Keys without which the prompts to come, or what their tokens mean, would not be those of the same run."""


class FileFacts(StrictModel):
    """Size and BLAKE2b digest of one file."""

    size: int = Field(ge=0)
    blake2b: str


class TrainingInfo(StrictModel):
    """What a checkpoint is.

    There is no state of a random generator: prompts follow from seed and step, an update draws
    nothing, and what engines draw depends on which requests meet in a batch.

    Attributes:
        nemo_war: version of the package that wrote it.
        step: steps that are done.
        epoch: policy epoch of the weights, the count of refits so far.
        consumed_samples: prompts so far.
        seed: of tasks and sampling.
        weights_digest: blake2b of the weights as the replicas have them.
        config: the keys that must be the same in a run that goes on.
        files: all others of the checkpoint, by path below its folder.
    """

    nemo_war: str = __version__
    step: int = Field(ge=1)
    epoch: int = Field(ge=1, le=1 << 30)
    consumed_samples: int = Field(ge=0)
    seed: int = Field(ge=0)
    weights_digest: str
    config: dict[str, Any]
    files: dict[str, FileFacts] = Field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, step: int, epoch: int, weights_digest: str) -> TrainingInfo:
        """That of a run as it is configured, without files."""
        grpo = config.grpo
        return cls(
            step=step,
            epoch=epoch,
            consumed_samples=step * grpo.num_prompts_per_step,
            seed=grpo.seed,
            weights_digest=weights_digest,
            config=must_agree(config),
        )


def must_agree(config: RunConfig) -> dict[str, Any]:
    """What a run has to share with a checkpoint to go on from it, by dotted key."""
    values = config.model_dump(mode="json")
    agreed = {}
    for key in _MUST_AGREE:
        value: Any = values
        for name in key.split("."):
            value = value[name]
        agreed[key] = value
    return agreed


def write(folder: Path, info: TrainingInfo) -> None:
    """Write it into a folder.

    Raises:
        OSError: it could not be written.
    """
    (folder / FILE_NAME).write_bytes(_encode(info))


def read(folder: Path) -> TrainingInfo:
    """That of a checkpoint.

    Raises:
        UserError: it is missing, damaged, another version's, or none.
    """
    path = folder / FILE_NAME
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        fields = json.loads(content)
        is_ours, version = fields.pop("format") == _FORMAT, fields.pop("version")
        del fields["checksum"]
    except OSError as error:
        raise refused(path, error.strerror) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise refused(path, "damaged, or not a checkpoint's") from None
    if not is_ours:
        raise refused(path, "not a checkpoint's")
    if version != _VERSION:
        raise refused(path, f"format {ascii(version)[:16]}, this version of nemo_war reads {_VERSION}")
    try:
        info = TrainingInfo.model_validate(fields, strict=True)
        encoded = _encode(info)
    except ValueError:  # pydantic's own too, and of what JSON can hold and no text: half a character
        raise refused(path, "damaged, or malformed") from None
    if encoded != content:
        raise refused(path, "damaged, its checksum is wrong")
    if not all(map(_is_inside, info.files)):
        raise refused(path, "it names a file outside of its folder")
    return info


def _is_inside(name: str) -> bool:
    """Whether a path can be that of a file below a checkpoint's folder."""
    path = PurePosixPath(name)
    return name.isprintable() and not path.is_absolute() and ".." not in path.parts


def digest(path: Path) -> str:
    """BLAKE2b of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def refused(path: Path, reason: str | None) -> UserError:
    """The error for a file of a checkpoint that cannot be used."""
    return UserError(
        f"checkpoint {path}: {reason}; remove its folder step_N to go on from the one before, "
        "or name another checkpointing.checkpoint_dir to start anew"
    )


def _encode(info: TrainingInfo) -> bytes:
    """The only text that stands for it, its own checksum included."""
    fields = {"format": _FORMAT, "version": _VERSION, **info.model_dump(mode="json")}
    checksum = hashlib.blake2b(_text(fields)).hexdigest()
    return _text(fields | {"checksum": checksum})


def _text(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n"
