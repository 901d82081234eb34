"""A language model that costs nothing and tells on stale KV: everything it says is a hash.

The next token depends on the weights, a seed and the context. A token's logprob depends on the
weights, the context and on all the weights that computed the KV it attends to. So a token that
was sampled on KV of other weights than the engine's has another logprob than `expected_logprobs`
says, and whoever knows the weights' digests can say of each token what it was computed on.

Text is made of runs along a fixed chain of tokens, which siblings and later policies share for the
most part, and of jumps, which depend on all of the context. Drafts from other trajectories are
right within a run and wrong at its end.

The fake engine and those who check what it says both import this module; it needs no engine.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

FIRST_TOKEN = 16
"""Tokens below are special and only sampled where they are the end of the sequence."""
_JUMPS_OF_64, _ENDS_OF_64 = 12, 1
"""How often a token is not the next one of the chain: runs of five, and turns of some sixty tokens."""
_CHANGED_LINKS = 8
"""One link of the chain in so many is the weights' own: a refit changes the text, but not by much."""


class Context:
    """A token sequence, as a hash that grows with it.

    Attributes:
        last: its last token, -1 while it is empty.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.last = -1
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end."""
        if tokens:
            self._hash.update(struct.pack(f"<{len(tokens)}i", *tokens))
            self.last = tokens[-1]

    def digest(self) -> bytes:
        """The hash of all tokens so far."""
        return self._hash.digest()


def next_token(
    weights: str, seed: str, context: Context, vocabulary: int, end: int, banned: Collection[int] = ()
) -> int:
    """The token that is sampled after a context, whether it was drafted or not.

    Args:
        weights: digest of the engine's weights.
        seed: what tells a request from its siblings.
        context: all tokens before, at least one.
        vocabulary: tokens lie below.
        end: the end-of-sequence token.
        banned: tokens that may not be sampled here.
    """
    key = [weights.encode(), seed.encode(), context.digest()]
    for attempt in itertools.count():
        number = _number(*key, b"%d" % attempt)
        kind, free = number % 64, number // 64
        if kind < _ENDS_OF_64:
            token = end
        elif kind < _ENDS_OF_64 + _JUMPS_OF_64 or attempt:
            token = FIRST_TOKEN + free % (vocabulary - FIRST_TOKEN)
        else:
            token = _chained(weights, context.last, vocabulary)
        if token not in banned:
            return token
    raise AssertionError("unreachable")


def logprob(weights: str, attended: frozenset[str], context: Context, token: int) -> float:
    """The logprob of a token after a context.

    Args:
        weights: digest of the engine's weights.
        attended: digests of all weights that had a part in the KV of the context.
        context: all tokens before.
        token: the token itself.
    """
    kv = ",".join(sorted(attended)).encode()
    return -1e-3 - 4 * _number(weights.encode(), kv, context.digest(), b"%d" % token) / 2**64


def expected_logprobs(weights: str, tokens: Sequence[int]) -> list[float]:
    """What an engine that never had other weights says of each token, given those before it."""
    context, fresh = Context(), frozenset({weights})
    logprobs = []
    for token in tokens:
        logprobs.append(logprob(weights, fresh, context, token))
        context.extend((token,))
    return logprobs


def weights_file(number: int, tensors: int = 4, size: int = 256) -> bytes:
    """A safetensors file with the made-up weights of policy `number`: so many tensors of so many bytes."""
    names = [f"model.layers.{layer}.weight" for layer in range(tensors)]
    places = {name: [place * size, (place + 1) * size] for place, name in enumerate(names)}
    header = json.dumps(
        {name: {"dtype": "U8", "shape": [size], "data_offsets": place} for name, place in places.items()}
    ).encode()
    data = b"".join(hashlib.shake_256(f"{number}/{name}".encode()).digest(size) for name in names)
    return len(header).to_bytes(8, "little") + header + data


def digest_of_file(content: bytes) -> str:
    """The digest of the weights in a safetensors file."""
    return digest_of(_tensors(content))


def digest_of_folder(model: str) -> str:
    """The digest of the weights that an engine starts with; of a name where there is no such folder."""
    files = sorted(Path(model).glob("*.safetensors"))
    if not files:
        return digest_of([(model, b"")])
    return digest_of(itertools.chain.from_iterable(_tensors(file.read_bytes()) for file in files))


def digest_of(tensors: Iterable[tuple[str, bytes | memoryview]]) -> str:
    """The digest of weights, whatever order they come in.

    Args:
        tensors: names, and each tensor's bytes as a safetensors file has them.
    """
    parts = []
    for name, data in tensors:
        part = hashlib.blake2b(name.encode() + b"\0", digest_size=16)
        part.update(data)
        parts.append(part.digest())
    return hashlib.blake2b(b"".join(sorted(parts)), digest_size=16).hexdigest()


def _tensors(content: bytes) -> Iterator[tuple[str, memoryview]]:
    start = 8 + int.from_bytes(content[:8], "little")
    data = memoryview(content)[start:]
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, data[begin:end]


def _chained(weights: str, last: int, vocabulary: int) -> int:
    own = _number(weights.encode(), b"%d" % last)
    link = own // _CHANGED_LINKS if own % _CHANGED_LINKS == 0 else _number(b"%d" % last)
    return FIRST_TOKEN + link % (vocabulary - FIRST_TOKEN)


def _number(*parts: bytes) -> int:
    """64 bits that depend on every part."""
    return int.from_bytes(hashlib.blake2b(b"\0".join(parts), digest_size=8).digest(), "little")
