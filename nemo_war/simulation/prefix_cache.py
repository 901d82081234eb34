"""The KV cache of a simulated engine: which blocks are held, found again and evicted, as in vLLM V1.

vLLM keeps a reference count for each block, a map from the hash of a block (and all before
it) to the block, and a queue of the blocks that nobody holds. A request gives its blocks
back tail first, and what is evicted comes from the front of that queue.

Here a block has no record of its own. Blocks that are held by the same requests lie in one
node of a radix tree, and are held, given back and evicted with one operation; hence the work
for a request depends on how often its text forks, not on how long it is. The queue holds
nodes and a node is evicted from its tail, so that the order is that of single blocks.

One thing differs: of blocks that two requests compute at the same time vLLM keeps both, and
here the second is dropped for the first. It finds the same prefixes and holds a block less.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


class _Node:
    """A run of blocks that the same requests hold.

    Attributes:
        parent: the run before it; None for the root, which is empty.
        start: place of its first block in a sequence.
        hashes: uint64[blocks]; never empty but in the root.
        holders: leases that hold it.
        children: runs that go on behind it, by their first hash.
    """

    __slots__ = ("children", "hashes", "holders", "parent", "start")

    def __init__(self, parent: _Node | None, start: int, hashes: np.ndarray, holders: int) -> None:
        self.parent, self.start, self.hashes, self.holders = parent, start, hashes, holders
        self.children: dict[int, _Node] = {}

    def agreement(self, wanted: np.ndarray, limit: int) -> int:
        """How many of its blocks a sequence that agrees in the first one has among its first `limit`."""
        size = min(len(self.hashes), limit - self.start)
        if self.hashes[size - 1] == wanted[self.start + size - 1]:
            return size
        low, high = 1, size - 1
        while low < high:
            middle = (low + high) // 2
            if self.hashes[middle] == wanted[self.start + middle]:
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(slots=True, eq=False)
class Lease:
    """What one sequence holds.

    Attributes:
        hashes: uint64[n], the names of its full blocks, those to come included.
        node: where its findable blocks end.
        blocks: findable blocks, from the start of the sequence.
        private: blocks behind them, which are not full yet.
    """

    hashes: np.ndarray
    node: _Node
    blocks: int = 0
    private: int = 0


class PrefixCache:
    """Blocks of KV, shared by prefix; the least recently held are evicted.

    Attributes:
        capacity: blocks in all.
        held: blocks that are held, a shared one counted once.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.held = capacity, 0
        self._root = _Node(None, 0, np.zeros(0, np.uint64), 0)
        self._idle: OrderedDict[_Node, None] = OrderedDict()
        self._idle_blocks = 0
        # Grows with what is evicted, up to a reset; 100 bytes a block.
        self._evicted: set[int] = set()

    @property
    def available(self) -> int:
        """Blocks that can be taken: free ones and those that would be evicted."""
        return self.capacity - self.held

    def acquire(self, hashes: np.ndarray, findable: int, needed: int) -> Lease | None:
        """Hold the longest prefix that is here.

        Args:
            hashes: uint64[n], the names of the sequence's blocks.
            findable: of its first so many blocks.
            needed: blocks that the sequence needs now, the findable ones included.

        Returns:
            A lease on the prefix; None, and nothing is held, where the rest would not fit.
        """
        found = list(self._walk(self._root, hashes, 0, findable))
        blocks = sum(size for _, size in found)
        idle = sum(size for node, size in found if not node.holders)
        if needed - blocks + idle > self.available:
            return None
        lease = Lease(hashes, self._root)
        for node, size in found:
            self._share(lease, node, size)
        return lease

    def take(self, lease: Lease, count: int) -> bool:
        """Hold so many blocks more, evicting others; false, and nothing is done, where they do not fit."""
        if count > self.available:
            return False
        self.held += count
        lease.private += count
        self._evict(self.held + self._idle_blocks - self.capacity)
        return True

    def commit(self, lease: Lease, blocks: int) -> None:
        """The first `blocks` blocks of the sequence are full: from now on others find them."""
        for node, size in list(self._walk(lease.node, lease.hashes, lease.blocks, blocks)):
            self._share(lease, node, size)
            lease.private -= size
            self.held -= size
        if lease.blocks < blocks:
            self._append(lease, blocks)

    def release(self, lease: Lease) -> None:
        """Hold nothing any more; what was findable stays so until it is evicted, the tail first."""
        self.held -= lease.private
        node = lease.node
        while node.parent is not None:
            node.holders -= 1
            if not node.holders:
                if node.hashes.base is not None:
                    node.hashes = node.hashes.copy()  # else the whole sequence's array stays in memory
                self._idle[node] = None
                self._idle_blocks += len(node.hashes)
                self.held -= len(node.hashes)
            node = node.parent
        lease.node, lease.blocks, lease.private = self._root, 0, 0

    def evicted(self, hashes: np.ndarray, start: int, limit: int) -> int:
        """How many blocks from `start` on, where a sequence is not found any more, were here once."""
        low, high = start, limit
        while low < high:
            middle = (low + high) // 2
            if int(hashes[middle]) in self._evicted:
                low = middle + 1
            else:
                high = middle
        return low - start

    def reset(self) -> None:
        """Forget everything, as after a change of weights.

        Raises:
            ValueError: something is held.
        """
        if self.held:
            raise ValueError(f"{self.held} blocks are held, so that the cache cannot be reset")
        self._root.children.clear()
        self._idle.clear()
        self._idle_blocks = 0
        self._evicted.clear()

    def check_integrity(self, leases: list[Lease]) -> bool:
        """Whether tree, counters and queue agree with each other and with all leases; for tests."""
        holders: dict[_Node, int] = {}
        for lease in leases:
            node = lease.node
            while node.parent is not None:
                holders[node] = holders.get(node, 0) + 1
                node = node.parent
        nodes = list(self._nodes(self._root))
        order = {node: place for place, node in enumerate(self._idle)}
        shared = sum(len(node.hashes) for node in nodes if node.holders)
        return (
            all(node.holders == holders.pop(node, 0) and len(node.hashes) for node in nodes)
            and not holders
            and order.keys() == {node for node in nodes if not node.holders}
            and all(order[child] < order[node] for node in order for child in node.children.values())
            and self._idle_blocks == sum(len(node.hashes) for node in order)
            and self.held == shared + sum(lease.private for lease in leases)
            and self.held + self._idle_blocks <= self.capacity
            and all(lease.blocks == lease.node.start + len(lease.node.hashes) for lease in leases)
        )

    def _walk(self, node: _Node, hashes: np.ndarray, at: int, limit: int) -> Iterator[tuple[_Node, int]]:
        """The nodes behind this one that a sequence runs through, and how far in each."""
        while at < limit:
            child = node.children.get(int(hashes[at]))
            if child is None:
                return
            size = child.agreement(hashes, limit)
            yield child, size
            if size < len(child.hashes):
                return
            node, at = child, at + size

    def _share(self, lease: Lease, node: _Node, size: int) -> None:
        if size < len(node.hashes):
            node = self._split(node, size)
        if not node.holders:
            self._idle.pop(node, None)  # the upper half of a split one is not in the queue
            self._idle_blocks -= size
            self.held += size
        node.holders += 1
        lease.node, lease.blocks = node, lease.blocks + size

    def _split(self, node: _Node, size: int) -> _Node:
        """Put the first `size` blocks into a node of their own; leases and queue keep the other one."""
        assert node.parent is not None
        upper = _Node(node.parent, node.start, node.hashes[:size], node.holders)
        upper.children[int(node.hashes[size])] = node
        node.parent.children[int(upper.hashes[0])] = upper
        node.parent, node.start, node.hashes = upper, node.start + size, node.hashes[size:]
        return upper

    def _append(self, lease: Lease, blocks: int) -> None:
        node = lease.node
        if node.parent is None or node.children or node.holders > 1:
            child = _Node(node, lease.blocks, lease.hashes[lease.blocks : blocks], 1)
            node.children[int(child.hashes[0])] = child
            lease.node = child
        else:
            node.hashes = lease.hashes[node.start : blocks]
        lease.private -= blocks - lease.blocks
        lease.blocks = blocks

    def _evict(self, count: int) -> None:
        while count > 0:
            node = next(iter(self._idle))
            keep = max(0, len(node.hashes) - count)
            gone, node.hashes = node.hashes[keep:], node.hashes[:keep]
            self._evicted.update(gone.tolist())
            self._idle_blocks -= len(gone)
            count -= len(gone)
            if not keep:
                assert node.parent is not None
                del self._idle[node], node.parent.children[int(gone[0])]

    def _nodes(self, node: _Node) -> Iterator[_Node]:
        for child in node.children.values():
            yield child
            yield from self._nodes(child)
