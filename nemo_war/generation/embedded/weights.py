"""A policy's weights on their way to the replicas."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray


@dataclass(frozen=True, slots=True)
class Weights:
    """One policy's weights in Ray's object store: one copy per node, however many replicas.

    Attributes:
        reference: object reference of a [bytes] uint8 array, a safetensors file.
        digest: blake2b of those bytes, as every replica must report it.
        size: in bytes.
    """

    reference: Any
    digest: str
    size: int


def share_weights(blob: bytes) -> Weights:
    """Put a safetensors file into the object store, once."""
    return Weights(ray.put(np.frombuffer(blob, dtype=np.uint8)), hashlib.blake2b(blob).hexdigest(), len(blob))
