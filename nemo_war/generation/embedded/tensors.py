"""Tensors on disk: a safetensors file that says which version of ours wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from nemo_war.errors import UserError

_WRITTEN = {"nemo_war": "1"}
"""Metadata of such a file: its version."""
_REMEDY = "remove the checkpoint it is in, and the one before it is resumed from"
_OTHER_MODEL = "set policy.model_name to the model that this run began with"


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file of mode 0600 that is complete or not there.

    Raises:
        OSError: it could not be written.
    """
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata=_WRITTEN)
    except safetensors.SafetensorError as error:  # which is what a full disk is called there
        raise OSError(f"{path}: {error}") from error


def read(
    path: Path, expected: Mapping[str, torch.Tensor], *, partial: bool = False
) -> dict[str, torch.Tensor]:
    """Read what `write` wrote.

    Args:
        path: the file.
        expected: tensors of the names, shapes and dtypes that must be there; their values do not matter.
        partial: some may be missing.

    Raises:
        UserError: the file cannot be read, is another one, or holds other tensors. They are compared
            before any is read.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            if file.metadata() != _WRITTEN:
                raise UserError(f"{path}: not written by this version of nemo_war; {_REMEDY}")
            names = set(file.keys())
            if unlike := sorted(names - set(expected) if partial else names ^ set(expected)):
                raise UserError(f"{path}: it and this model do not both have {unlike[0]}; {_OTHER_MODEL}")
            for name in names:
                if tuple(file.get_slice(name).get_shape()) != tuple(expected[name].shape):
                    raise UserError(f"{path}: {name} has another shape than in this model; {_OTHER_MODEL}")
            found = {name: file.get_tensor(name) for name in names}
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}; {_REMEDY}") from None
    if wrong := [name for name, tensor in found.items() if tensor.dtype != expected[name].dtype]:
        raise UserError(f"{path}: {wrong[0]} is {found[wrong[0]].dtype}; {_REMEDY}")
    return found
