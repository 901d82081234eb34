"""64-bit digests: names of KV blocks, and tokens made up where none are on record."""

from __future__ import annotations

import numpy as np

VOCABULARY = 32_000
"""Tokens that are made up lie below this, as those of a common tokenizer do."""

_STEP, _FIRST, _SECOND = (
    np.uint64(constant) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def mix(values: np.ndarray) -> np.ndarray:
    """The output function of splitmix64: uint64[...] to uint64[...], each bit depending on all."""
    mixed = values + _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return mixed ^ (mixed >> np.uint64(31))


def chain(tokens: np.ndarray, block_size: int, salt: int = 0) -> np.ndarray:
    """Names of the full blocks of a sequence; each depends on its block and on all before it.

    Two sequences agree in a name exactly when they agree in all tokens up to there (and in
    the salt), so that names agree up to some block and never behind it.

    Args:
        tokens: int32[n].
        block_size: tokens of a block.
        salt: what else the KV depends on, as a number below 2^64.

    Returns:
        uint64[n // block_size].
    """
    count = len(tokens) // block_size
    blocks = np.asarray(tokens)[: count * block_size].reshape(count, block_size).astype(np.uint64)
    weights = mix(np.arange(block_size, dtype=np.uint64)) | np.uint64(1)
    # A sum of links, each of which knows its place, is a chain without a loop over blocks. Places must not be
    # told apart by what tells tokens of a block apart: two blocks could change places then.
    places = mix(np.arange(count, dtype=np.uint64) + _SECOND)
    links = mix((blocks * weights).sum(axis=1, dtype=np.uint64) ^ places)
    return mix(np.cumsum(links, dtype=np.uint64) ^ mix(np.array([salt], np.uint64)))


def invent(seed: int, places: np.ndarray) -> np.ndarray:
    """Tokens that depend on the seed and the place only.

    Args:
        seed: below 2^64.
        places: int64[n], any numbers.

    Returns:
        int32[n].
    """
    keys = mix(places.astype(np.uint64) ^ mix(np.array([seed], np.uint64)))
    return (keys % np.uint64(VOCABULARY)).astype(np.int32)
