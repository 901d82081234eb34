"""KV blocks: who holds them, by which name they are found again, and which weights computed them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block.

    Attributes:
        ref_cnt: requests that hold it.
        block_hash: its name in the prefix cache; None while it has none.
        weights: digests of all weights that had a part in its KV. KV computed while attending to
            KV of older weights is theirs, too.
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None
    weights: frozenset[str] = frozenset()


class BlockPool:
    """All blocks; those that nobody holds are evicted in the order in which they were let go.

    As in vLLM, block 0 stands for no block, a named block that is let go stays findable until it is taken
    for something else, and blocks without a name are taken first. Unlike there, a second block with the
    name of another gets none, and is not found when the first is evicted.
    """

    def __init__(self, num_gpu_blocks: int) -> None:
        self.blocks = [KVCacheBlock(number) for number in range(num_gpu_blocks)]
        self._free = OrderedDict((block.block_id, block) for block in self.blocks[1:])
        self._found: dict[bytes, KVCacheBlock] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def find(self, hashes: Iterable[bytes]) -> list[KVCacheBlock]:
        """The blocks of these names, up to the first that is missing."""
        found = []
        for name in hashes:
            block = self._found.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold blocks that were found."""
        for block in blocks:
            self._free.pop(block.block_id, None)
            block.ref_cnt += 1

    def take(self, count: int) -> list[KVCacheBlock]:
        """Hold so many new blocks.

        Raises:
            ValueError: there are fewer.
        """
        if count > len(self._free):
            raise ValueError(f"Cannot get {count} free blocks from the pool")
        taken = [self._free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            self._forget(block)
            block.ref_cnt, block.weights = 1, frozenset()
        return taken

    def name(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """Let a full block be found, unless another one has that name."""
        if block.block_hash is None and block_hash not in self._found:
            block.block_hash = block_hash
            self._found[block_hash] = block

    def free(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Let go of a request's blocks, given in order; its last ones are evicted first."""
        for block in reversed(list(blocks)):
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._free[block.block_id] = block
                if block.block_hash is None:
                    self._free.move_to_end(block.block_id, last=False)

    def reset(self) -> bool:
        """Forget all names; False, and nothing happens, while any block is held."""
        if len(self._free) != len(self.blocks) - 1:
            return False
        for block in list(self._found.values()):
            self._forget(block)
        return True

    def check_integrity(self, held: Iterable[KVCacheBlock]) -> bool:
        """Whether the books agree with what requests hold; for tests."""
        counts = dict.fromkeys(range(len(self.blocks)), 0)
        for block in held:
            counts[block.block_id] += 1
        return (
            all(block.ref_cnt == counts[block.block_id] for block in self.blocks)
            and self._free.keys() == {block.block_id for block in self.blocks[1:] if not block.ref_cnt}
            and all(self._found[name].block_hash == name for name in self._found)
            and len(self._found) == sum(block.block_hash is not None for block in self.blocks)
        )

    def _forget(self, block: KVCacheBlock) -> None:
        if block.block_hash is not None:
            del self._found[block.block_hash]
            block.block_hash = None
