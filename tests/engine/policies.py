"""Weights that differ from the bundled model's, for refits."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save, save_file


def perturbed(model: Path, scale: float, seed: int = 0) -> dict[str, torch.Tensor]:
    """The model's weights with noise of this share of each tensor's spread."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model / "model.safetensors")
    return {
        name: (w.float() + scale * w.float().std() * torch.randn(w.shape, generator=generator)).to(w.dtype)
        if w.ndim == 2
        else w
        for name, w in weights.items()
    }


def as_bytes(weights: dict[str, torch.Tensor]) -> bytes:
    return save(weights)


def as_folder(model: Path, weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """A model folder with these weights."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
