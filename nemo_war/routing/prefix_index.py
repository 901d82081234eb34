"""Which replica holds how much of a prompt's KV: a scheduler's own picture of its replicas' prefix caches.

The chains of block hashes (see `blocks`) that were placed form a tree, and each replica holds a part of it
(see `residency`). What all replicas hold of a chain is read off the few nodes that it runs through.
Nothing here asks a replica. What it reports of cached tokens corrects the picture, see `PrefixIndex.correct`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from nemo_war.routing.residency import Holder, Node, Stay, Total


@dataclass(slots=True, eq=False)
class Lease:
    """A chain's blocks on a replica, not to be evicted until `PrefixIndex.release`.

    Attributes:
        trajectory: whose turn it is.
        replica: where.
        blocks: length of the chain.
        believed: leading blocks that were taken to be there before the placement.
    """

    trajectory: str
    replica: int
    blocks: int
    believed: int
    _known: int  # as believed, but for those of an output, which may have come back as other tokens
    _stamp: int  # of the deepest known block; 0 where a running request used it, perhaps yet to compute it
    _last: int  # hash of the chain's last block
    _holder: Holder
    _leaf: Node | None  # the node that the chain ends with; None once released
    _output: Stay | None = None


class PrefixIndex:
    """Who holds which leading blocks of every chain placed, within the replicas' capacities."""

    def __init__(self, max_blocks: int = 1 << 25, max_trajectories: int = 1 << 15) -> None:
        """Hold nothing yet.

        Args:
            max_blocks: that all replicas together are believed to hold, which bounds the memory (8 bytes a
                block) where capacities are not known; beyond it the fullest replica is taken to evict.
            max_trajectories: so many count as live; the one that was placed first is over first.
        """
        self._max_blocks = max_blocks
        self._max_trajectories = max_trajectories
        self._root = Node(None, 0, array("Q"))
        self._total = Total()
        self._holders: dict[int, Holder] = {}
        self._turns: OrderedDict[str, Lease] = OrderedDict()
        self._releases = 0

    @property
    def held(self) -> int:
        """Blocks that all replicas together are believed to hold."""
        return self._total.blocks

    def used(self, replica: int) -> int:
        """Blocks that the replica is believed to hold; beyond its capacity only while requests need them."""
        return self._holders[replica].used if replica in self._holders else 0

    def set_capacity(self, replica: int, blocks: int) -> None:
        """What the replica can hold; 0 where that is unknown, which bounds nothing."""
        holder = self._holder(replica)
        if holder.capacity != blocks:
            holder.capacity = blocks
            self._make_room(holder)

    def match(self, chain: np.ndarray, trajectory: str) -> dict[int, int]:
        """How many leading blocks of a chain each replica holds.

        A trajectory's last output is taken to follow its last prompt in this one.

        Args:
            chain: uint64[blocks].
            trajectory: whose chain it is.

        Returns:
            Leading blocks by replica, in no order; of a replica with none there is no entry.
        """
        depths: dict[int, int] = {}
        path, agreed = self._walk(chain)
        for node in path:
            depths.update(node.depths)
        if path and agreed < path[-1].end:
            for replica in path[-1].depths:
                depths[replica] = min(depths[replica], agreed)
        turn = self._turns.get(trajectory)
        if turn is not None:
            returned = _returned(turn, chain, depths.get(turn.replica, 0))
            if returned:
                depths[turn.replica] = turn.blocks + returned
        return depths

    def place(self, replica: int, trajectory: str, chain: np.ndarray) -> Lease:
        """The replica gets this chain's request: it holds all of its blocks from now on.

        Blocks beyond its capacity are evicted; none that a running request uses, even if these are too many.

        Args:
            replica: where to.
            trajectory: whose turn it is.
            chain: uint64[blocks] of its prompt.

        Returns:
            To be released when the request is over.
        """
        holder = self._holder(replica)
        path, agreed = self._walk(chain)
        known, stamp = _known(holder, path, agreed)
        returned = self._take_output(holder, trajectory, chain, known)
        leaf = self._insert(path, agreed, chain)
        node = leaf
        while node.parent is not None:
            holder.pin(node)
            node = node.parent
        last = leaf.hashes[-1] if leaf.hashes else 0
        lease = Lease(trajectory, replica, len(chain), known + returned, known, stamp, last, holder, leaf)
        self._remember(lease)
        self._make_room(holder)
        return lease

    def release(self, lease: Lease, output_blocks: int = 0) -> None:
        """The request is over; its blocks may be evicted from now on. No effect if its replica was cleared.

        Args:
            lease: of the request.
            output_blocks: blocks that its output filled. They take up room, without a name until the
                trajectory's next prompt tells it.

        Raises:
            ValueError: it was released before.
        """
        leaf, holder = lease._leaf, lease._holder
        if leaf is None:
            raise ValueError(
                f"prefix index: {lease.trajectory} was released twice on replica {lease.replica}"
            )
        lease._leaf = None
        if self._holders[lease.replica] is not holder:
            return
        self._releases += 1
        if output_blocks:
            lease._output = holder.add_output(output_blocks, self._releases)
        node = leaf
        while node.parent is not None:
            holder.unpin(node, self._releases)
            node = node.parent
        self._make_room(holder)

    def correct(self, lease: Lease, cached_blocks: int) -> None:
        """Learn from what the engine found cached when the request came, before or after its release.

        Less than was known to be there means that the rest had been evicted, and with it all that was last
        used no later: that is dropped here. (The chain itself has been computed again by now.) Where the
        capacity is unknown, what is left bounds it from then on, until an engine has more than was believed.
        Nothing is learned from a chain's last block, as engines compute the last token anew, and from one
        that another request was using, as it may not have been computed yet.

        Args:
            lease: of the request. No effect if its replica was cleared.
            cached_blocks: full blocks of the prompt that were cached.
        """
        holder = lease._holder
        if self._holders[lease.replica] is not holder:
            return
        if cached_blocks > lease.believed:
            holder.learned = 0
        elif lease._stamp and cached_blocks < min(lease._known, lease.blocks - 1):
            holder.evict_until(lease._stamp)
            holder.learned = holder.used

    def end(self, trajectory: str) -> None:
        """The trajectory is over: no prompt will follow its output. Its blocks stay until room is needed."""
        self._turns.pop(trajectory, None)

    def clear(self, replica: int | None = None) -> None:
        """The replica, or every one, holds nothing: it was restarted, or the weights have changed.

        Leases there are void. Capacities stay; what was learned of unknown ones is forgotten.
        """
        for number in list(self._holders) if replica is None else {replica} & self._holders.keys():
            former = self._holders[number]
            former.abandon()
            # What refers to the former object, as leases do, is void.
            self._holders[number] = Holder(number, former.capacity, self._total)
        if replica is None:
            self._turns.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError, with the reason, if the structures contradict each other."""
        nodes, todo = set(), [self._root]
        while todo:
            node = todo.pop()
            nodes.add(node)
            todo.extend(node.children.values())
            for first, child in node.children.items():
                if child.parent is not node or child.start != node.end or child.hashes[0] != first:
                    raise AssertionError("prefix index: a node is not where its parent ends")
                if not child.start + len(child.hashes) == child.end == max(child.depths.values(), default=-1):
                    raise AssertionError("prefix index: a node has blocks that nobody holds, or lacks some")
        for holder in self._holders.values():
            _check(holder, nodes)
        pins = dict.fromkeys(nodes, 0)
        for holder in self._holders.values():
            for node, stay in holder.stays.items():
                pins[node] += stay.pins
        if any(node.pins != count for node, count in pins.items()):
            raise AssertionError("prefix index: the pins of a node do not add up")
        if self._total.blocks != sum(holder.used for holder in self._holders.values()):
            raise AssertionError("prefix index: the blocks of the replicas do not add up")

    def _holder(self, replica: int) -> Holder:
        holder = self._holders.get(replica)
        if holder is None:
            holder = self._holders[replica] = Holder(replica, 0, self._total)
        return holder

    def _walk(self, chain: np.ndarray) -> tuple[list[Node], int]:
        """The nodes that a chain shares blocks with, from the first on, and how many blocks these are."""
        path: list[Node] = []
        node, agreed, blocks = self._root, 0, len(chain)
        while agreed < blocks and agreed == node.end:
            child = node.children.get(chain.item(agreed))
            if child is None:
                break
            node = child
            agreed = node.agreement(chain)
            path.append(node)
        return path, agreed

    def _insert(self, path: list[Node], agreed: int, chain: np.ndarray) -> Node:
        """Put a chain into the tree, given what `_walk` found; the node that it ends with."""
        node = path[-1] if path else self._root
        if agreed < node.end:
            lower, node = node, node.cut(agreed)
            for replica in list(lower.depths):
                self._holders[replica].split(lower, node)
        if agreed == len(chain):
            return node
        fresh = array("Q", chain[agreed:].tobytes())
        # What a running request has pinned must not grow: the pins of its release would cover too much.
        if node.parent is not None and not node.children and not node.pins:
            node.grow(fresh)
            return node
        child = node.children[fresh[0]] = Node(node, agreed, fresh)
        return child

    def _take_output(self, holder: Holder, trajectory: str, chain: np.ndarray, known: int) -> int:
        """Take away the blocks of the trajectory's last output that the chain has names for; how many."""
        turn = self._turns.get(trajectory)
        if turn is None or turn._output is None or turn._holder is not holder:
            return 0
        returned = _returned(turn, chain, known)
        if returned:
            holder.shed(turn._output, returned)
        return returned

    def _remember(self, lease: Lease) -> None:
        """This is its trajectory's last turn."""
        self._turns[lease.trajectory] = lease
        if len(self._turns) > self._max_trajectories:
            self._turns.popitem(last=False)

    def _make_room(self, holder: Holder) -> None:
        """Evict what is beyond the replica's capacity, and beyond the bound for all."""
        if holder.bound:
            holder.evict(holder.used - holder.bound)
        while self._total.blocks > self._max_blocks:
            yielding = [each for each in self._holders.values() if each.ring.newer is not each.ring]
            if not yielding:
                break
            max(yielding, key=lambda each: each.used).evict(self._total.blocks - self._max_blocks)


def _returned(turn: Lease, chain: np.ndarray, known: int) -> int:
    """How many blocks of the turn's output follow its prompt's in a later chain of its trajectory.

    Args:
        turn: the last one.
        chain: the later chain.
        known: blocks of it that the turn's replica holds.
    """
    if turn._output is None or known != turn.blocks or (known and chain.item(known - 1) != turn._last):
        return 0
    return min(turn._output.blocks, len(chain) - known)


def _known(holder: Holder, path: list[Node], agreed: int) -> tuple[int, int]:
    """How many blocks of the path a replica holds, and the stamp of the last, as in `Lease`."""
    for node in reversed(path):
        stay = holder.stays.get(node)
        if stay is not None:
            return min(node.start + stay.blocks, agreed), 0 if stay.pins else stay.stamp
    return 0, 0


def _check(holder: Holder, nodes: set[Node]) -> None:
    """See `PrefixIndex.check_integrity`."""
    idle = list(holder.idle())
    if {stay for stay in idle if stay.node} != {stay for stay in holder.stays.values() if not stay.pins}:
        raise AssertionError(f"prefix index: what replica {holder.number} may evict is not what is idle")
    if holder.used != sum(stay.blocks for stay in {*idle, *holder.stays.values()}):
        raise AssertionError(f"prefix index: the blocks of replica {holder.number} do not add up")
    for node, stay in holder.stays.items():
        if node not in nodes or stay.node is not node or stay.blocks < 1:
            raise AssertionError(f"prefix index: replica {holder.number} holds a node that is not there")
        if node.depths.get(holder.number) != node.start + stay.blocks:
            raise AssertionError(f"prefix index: replica {holder.number} and a node disagree")
    if [stay.stamp for stay in idle] != sorted(stay.stamp for stay in idle):
        raise AssertionError(f"prefix index: replica {holder.number} evicts out of order")
    place = {stay.node: number for number, stay in enumerate(idle)}
    for node in holder.stays:
        upper = node.parent
        if upper is None or upper.parent is None:
            continue
        if holder.stays[upper].blocks < len(upper.hashes) or place.get(node, -1) > place.get(
            upper, len(idle)
        ):
            raise AssertionError(f"prefix index: replica {holder.number} would evict a head before its tail")
