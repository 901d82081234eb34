"""Names of KV blocks: a chain of hashes per prompt, of which only what is new is computed.

A block's hash seeds that of the block after it, so that it names the block together with all that precedes
it, as the engines' own names do (vLLM's `hash_block_tokens`). The hash is xxHash's XXH3, 64 bits. It does not
withstand an adversary; a collision costs a wrong estimate of where some KV is, never a wrong token.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

_SPARE = 8
"""A chain's buffer grows by an eighth more than it must, so that few of the turns appending to it copy it."""


def salt_of(epoch: int, variant: str) -> int:
    """What a chain starts from: KV of another policy epoch or variant is not the same for the same tokens.

    Args:
        epoch: of the weights that compute the KV.
        variant: what else it depends on, as in `TurnFacts.variant`.
    """
    return xxh3_64_intdigest(f"{epoch} {variant}".encode(errors="surrogatepass"))


@dataclass(slots=True)
class _Chain:
    """What is known of one trajectory's prompt.

    Attributes:
        salt: what the chain starts from.
        digest: of the tokens of all its blocks, taken as one.
        blocks: length of the chain.
        hashes: uint64[>= blocks], the chain and room to grow. What is written stays as it is.
    """

    salt: int
    digest: int
    blocks: int
    hashes: np.ndarray


class Chains:
    """The chain of each trajectory so far."""

    def __init__(self, block_tokens: int = 64, max_trajectories: int = 1 << 15) -> None:
        """Know no trajectory yet.

        Args:
            block_tokens: tokens of a block here. A multiple of the engines' own, else what they call cached
                does not end where a block does. Larger is faster, and blind to shorter shared prefixes.
            max_trajectories: so many are remembered; the one that came first goes first. Should it still be
                live, its next prompt is hashed from its start.
        """
        self.block_tokens = block_tokens
        self._max_trajectories = max_trajectories
        self._known: OrderedDict[str, _Chain] = OrderedDict()

    def __len__(self) -> int:
        """Number of trajectories remembered."""
        return len(self._known)

    def extend(self, trajectory: str, prompt: np.ndarray, salt: int) -> tuple[np.ndarray, int]:
        """The chain of the prompt's full blocks.

        It is what hashing the whole prompt gives, up to a collision, whatever was extended before: an edit
        anywhere in the history, a shorter prompt or another salt is noticed, and all blocks are hashed anew.
        Where the trajectory's last prompt is continued, only the new blocks are hashed, and one digest is
        taken over those known, which runs at memory speed: a 30th of what hashing them one by one takes.

        Args:
            trajectory: whose prompt it is.
            prompt: int32[tokens]; other integers are converted first.
            salt: see `salt_of`.

        Returns:
            uint64[len(prompt) // block_tokens], not to be written to, which later calls leave as it is;
            and how many of these blocks the trajectory's last prompt had.
        """
        tokens = np.ascontiguousarray(prompt, np.int32).data
        blocks = len(tokens) // self.block_tokens
        chain = self._known.get(trajectory)
        digest = xxh3_64()
        if chain is None or chain.salt != salt or not self._continues(chain, tokens, digest):
            chain = _Chain(salt, 0, 0, np.empty(blocks, np.uint64))
            digest.reset()
        known = chain.blocks
        digest.update(tokens[known * self.block_tokens : blocks * self.block_tokens])
        chain.digest = digest.intdigest()
        self._append(chain, tokens, blocks)
        self._known[trajectory] = chain
        if len(self._known) > self._max_trajectories:
            self._known.popitem(last=False)
        return chain.hashes[:blocks], known

    def drop(self, trajectory: str) -> None:
        """Forget the trajectory, if it is known."""
        self._known.pop(trajectory, None)

    def _continues(self, chain: _Chain, tokens: memoryview, digest: xxh3_64) -> bool:
        """Whether the tokens begin with the chain's, which are fed to the digest."""
        known = chain.blocks * self.block_tokens
        if len(tokens) < known:
            return False
        digest.update(tokens[:known])
        return digest.intdigest() == chain.digest

    def _append(self, chain: _Chain, tokens: memoryview, blocks: int) -> None:
        """Hash the blocks from the chain's end on."""
        size = self.block_tokens
        last = chain.hashes.item(chain.blocks - 1) if chain.blocks else chain.salt
        fresh = []
        for start in range(chain.blocks * size, blocks * size, size):
            last = xxh3_64_intdigest(tokens[start : start + size], last)
            fresh.append(last)
        if blocks > len(chain.hashes):
            grown = np.empty(blocks + blocks // _SPARE, np.uint64)
            grown[: chain.blocks] = chain.hashes[: chain.blocks]
            chain.hashes = grown
        chain.hashes[chain.blocks : blocks] = fresh
        chain.blocks = blocks
