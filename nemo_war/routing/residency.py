"""What replicas hold of a tree of block runs, and in which order they evict it.

The tree's nodes are runs of blocks: a node ends where chains part, or where one ended. A replica that holds
a block holds all before it, so that one number per node and replica says what is there, and a trajectory is a
few nodes however many its turns.

What a replica evicts follows vLLM's free queue (`vllm/v1/core/block_pool.py`): blocks of running requests
stay; the others go by last use, and of what was last used together the tail before the head. All blocks of a
node that a replica holds were last used together, so that a node takes a single place in that order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


class Node:
    """A run of blocks that the same chains include.

    Attributes:
        parent: the run before it; None for the root, which is empty.
        start: blocks before it.
        end: blocks up to its end.
        hashes: of its blocks, as many as the replica with the most of them holds.
        children: the runs after it, by their first hash.
        depths: per replica with any of its blocks, the blocks held from the chain's very first on.
        pins: running requests whose chain includes it, on all replicas.
    """

    __slots__ = ("children", "depths", "end", "hashes", "parent", "pins", "start")

    def __init__(self, parent: Node | None, start: int, hashes: array[int]) -> None:
        self.parent = parent
        self.start = start
        self.end = start + len(hashes)
        self.hashes = hashes
        self.children: dict[int, Node] = {}
        self.depths: dict[int, int] = {}
        self.pins = 0

    def agreement(self, chain: np.ndarray) -> int:
        """Leading blocks of a chain that are those up to a place in this node, whose first block is one.

        Chained hashes agree up to some block and nowhere after it, so that the last one mostly tells, and
        bisection finds the place where it does not.
        """
        low, high = self.start + 1, min(self.end, len(chain))
        middle = high
        while low < high:
            if chain.item(middle - 1) == self.hashes[middle - 1 - self.start]:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def grow(self, hashes: array[int]) -> None:
        """Add blocks at its end."""
        self.hashes.extend(hashes)
        self.end += len(hashes)

    def cut(self, depth: int) -> Node:
        """Make two of it, at this many blocks of the chain; who holds what is left to the caller.

        Returns:
            The upper. The lower is still this node: a request keeps the node that its chain ends with.
        """
        count = depth - self.start
        upper = Node(self.parent, self.start, self.hashes[:count])
        upper.pins = self.pins
        if self.parent is not None:
            self.parent.children[upper.hashes[0]] = upper
        del self.hashes[:count]
        upper.children[self.hashes[0]] = self
        self.parent, self.start = upper, depth
        return upper

    def trim(self) -> None:
        """Forget the blocks that no replica holds any more. Where there are children, all are held."""
        first = self.hashes[0]
        self.end = max(self.depths.values(), default=self.start)
        del self.hashes[self.end - self.start :]
        if not self.hashes and self.parent is not None:
            del self.parent.children[first]


class Stay:
    """Blocks on one replica that were last used together; idle ones form a ring in the order of that use.

    Attributes:
        node: whose leading blocks these are; None for those of an output, whose hashes are not known.
        blocks: how many.
        stamp: when that use ended.
        pins: running requests that use them; idle at 0.
        older, newer: neighbours in the ring; there are none while pinned.
    """

    __slots__ = ("blocks", "newer", "node", "older", "pins", "stamp")
    older: Stay
    newer: Stay

    def __init__(self, node: Node | None, blocks: int, stamp: int = 0) -> None:
        self.node = node
        self.blocks = blocks
        self.stamp = stamp
        self.pins = 0

    def link(self, older: Stay) -> None:
        """Enter the ring, right after this one."""
        self.older, self.newer = older, older.newer
        older.newer.older = self
        older.newer = self

    def unlink(self) -> None:
        """Leave the ring. Who keeps the stay must not keep its former neighbours alive, and theirs."""
        self.older.newer, self.newer.older = self.newer, self.older
        del self.older, self.newer


@dataclass(slots=True)
class Total:
    """Blocks that all replicas together hold."""

    blocks: int = 0


class Holder:
    """One replica.

    Attributes:
        number: its own.
        capacity: blocks that it can hold; 0 where unknown.
        learned: bound on an unknown capacity, from what it was seen to have evicted; 0 before that.
        used: blocks it holds.
        stays: its blocks by node. Those of outputs are in the ring only.
        ring: start and end of the ring: `newer` is the oldest idle stay, `older` the newest.
    """

    __slots__ = ("_total", "capacity", "learned", "number", "ring", "stays", "used")

    def __init__(self, number: int, capacity: int, total: Total) -> None:
        self.number = number
        self.capacity = capacity
        self.learned = 0
        self.used = 0
        self.stays: dict[Node, Stay] = {}
        self.ring = Stay(None, 0)
        self.ring.older = self.ring.newer = self.ring
        self._total = total

    @property
    def bound(self) -> int:
        """Blocks that it is taken to be able to hold; 0 where nothing is known."""
        return self.capacity or self.learned

    def idle(self) -> Iterator[Stay]:
        """What may be evicted, in that order."""
        stay = self.ring.newer
        while stay is not self.ring:
            yield stay
            stay = stay.newer

    def pin(self, node: Node) -> None:
        """A request uses all blocks of the node, and computes those that are not there."""
        stay = self.stays.get(node)
        if stay is None:
            stay = self.stays[node] = Stay(node, 0)
        elif not stay.pins:
            stay.unlink()
        missing = node.end - node.start - stay.blocks
        if missing:
            stay.blocks += missing
            node.depths[self.number] = node.end
            self._count(missing)
        stay.pins += 1
        node.pins += 1

    def unpin(self, node: Node, stamp: int) -> None:
        """The request is over. To be told of its nodes from the last to the first: so they are evicted."""
        stay = self.stays[node]
        stay.pins -= 1
        node.pins -= 1
        if not stay.pins:
            stay.stamp = stamp
            stay.link(self.ring.older)

    def add_output(self, blocks: int, stamp: int) -> Stay:
        """A request's output filled these; to be told before its nodes are unpinned."""
        tail = Stay(None, blocks, stamp)
        tail.link(self.ring.older)
        self._count(blocks)
        return tail

    def split(self, node: Node, upper: Node) -> None:
        """The node was cut, and this is the upper part."""
        stay, head = self.stays[node], len(upper.hashes)
        upper.depths[self.number] = upper.start + min(stay.blocks, head)
        if stay.blocks <= head:
            self.stays[upper] = self.stays.pop(node)
            stay.node = upper
            del node.depths[self.number]
            return
        fresh = self.stays[upper] = Stay(upper, head, stay.stamp)
        fresh.pins = stay.pins
        stay.blocks -= head
        if not stay.pins:
            fresh.link(stay)

    def evict(self, blocks: int) -> None:
        """Take so many blocks away, the longest unused first, or all idle ones where these are fewer."""
        while blocks > 0 and (oldest := self.ring.newer) is not self.ring:
            gone = min(oldest.blocks, blocks)
            self.shed(oldest, gone)
            blocks -= gone

    def evict_until(self, stamp: int) -> None:
        """Take away all idle blocks whose last use ended no later."""
        while (oldest := self.ring.newer) is not self.ring and oldest.stamp <= stamp:
            self.shed(oldest, oldest.blocks)

    def abandon(self) -> None:
        """Take away everything, also from running requests; one by one, which leaves no cycles as garbage."""
        self.evict(self.used)
        for node, stay in sorted(self.stays.items(), key=lambda item: -item[0].start):
            node.pins -= stay.pins
            self.shed(stay, stay.blocks)

    def shed(self, stay: Stay, blocks: int) -> None:
        """Take away a stay's last blocks, and the stay with its last one; no deeper stay is there."""
        stay.blocks -= blocks
        self._count(-blocks)
        if not stay.blocks and not stay.pins:
            stay.unlink()
        node = stay.node
        if node is None:
            return
        was_whole = node.depths[self.number] == node.end
        if stay.blocks:
            node.depths[self.number] = node.start + stay.blocks
        else:
            del node.depths[self.number], self.stays[node]
        if was_whole and not node.children:
            node.trim()

    def _count(self, blocks: int) -> None:
        self.used += blocks
        self._total.blocks += blocks
