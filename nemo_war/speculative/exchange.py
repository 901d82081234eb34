"""What goes where when replicas tell each other of their histories: pure books and decisions.

A replica learns by itself what it generated. The books say how far each replica knows each
trajectory, and how far it will once what is on its way has arrived, from facts:

    exchange.placed(...), exchange.finished(...), exchange.ended(...)   # turns, as they come and go
    exchange.arrived(batch, replica)          # it was taken in there
    exchange.failed(batch, replica)           # it was not: as if it had never been sent
    exchange.lost(replica)                    # and all that it knew

A decision is a list of batches, and what was decided is not decided again:

    exchange.live()                           # finished turns, to where siblings run
    exchange.end_step()                       # everything, to every replica that lacks it
    exchange.seed(replica)                    # everything, to one that came back empty

A trajectory travels whole and from the replica that knows it furthest, to those that know
less of it. So a batch that arrives twice or late changes nothing, one that is lost is made up
for by the next exchange, and a shorter text never follows a longer one. Sending only what is
new would need the two ends to agree on what is old; the history stores only that anyway.

Everything is bounded. What is over a bound is left out, oldest first, and counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

MAX_NAMES = 16_384
"""Trajectories remembered, a kilobyte each in a fleet of eight: several steps of a large job. Those of the
earlier steps have been told to everybody, and are remembered for replicas that come back empty."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Trajectories that travel together.

    Attributes:
        source: replica that has them.
        targets: replicas that learn them.
        lengths: by trajectory, how many of its tokens; the longest unchanged comes first.
        number: batches count up, so that a replica's earlier life can be told from its present one.
    """

    source: int
    targets: tuple[int, ...]
    lengths: dict[str, int]
    number: int = field(default=0, compare=False)

    @property
    def tokens(self) -> int:
        """Sum of the lengths."""
        return sum(self.lengths.values())


@dataclass(slots=True)
class _Known:
    """Who knows how much of a trajectory.

    Attributes:
        group: name of its group.
        at: tokens known, by replica.
        promised: the same, with what is on its way.
        home: replica of its last finished turn.
        place: replica of its last turn, finished or not; None once it has ended.
    """

    group: str
    at: dict[int, int] = field(default_factory=dict)
    promised: dict[int, int] = field(default_factory=dict)
    home: int | None = None
    place: int | None = None

    def learn(self, replica: int, tokens: int) -> None:
        """The replica knows at least so much."""
        self.at[replica] = max(tokens, self.at.get(replica, 0))
        self.promised[replica] = max(tokens, self.promised.get(replica, 0))

    def is_told(self, replicas: Iterable[int]) -> bool:
        """Whether they all know, or are about to, what any replica knows."""
        furthest = max(self.at.values(), default=0)
        return all(self.promised.get(replica, 0) >= furthest for replica in replicas)


class Exchange:
    """The books of one fleet.

    Attributes:
        dropped: trajectories that were left out of a batch, or forgotten before all knew them.
    """

    def __init__(self, replicas: Iterable[int], max_batch_tokens: int, max_names: int = MAX_NAMES) -> None:
        """All replicas are there, and know nothing.

        Args:
            replicas: their numbers.
            max_batch_tokens: most tokens of one batch; a longer trajectory never travels.
            max_names: trajectories remembered.
        """
        self._replicas = tuple(sorted(replicas))
        self._max_batch_tokens, self._max_names = max_batch_tokens, max_names
        self._batches = 0
        self.dropped = 0
        self.clear()

    def clear(self) -> None:
        """Every history was emptied; all replicas are there."""
        self._up = set(self._replicas)
        # By replica, the last batch that was decided on in an earlier life of its.
        self._born = dict.fromkeys(self._replicas, self._batches)
        self._known: OrderedDict[str, _Known] = OrderedDict()  # the longest unchanged first
        self._running: dict[str, set[str]] = {}  # by group, the trajectories that have not ended
        self._fresh: dict[str, None] = {}  # finished a turn since the last live exchange
        self._due: dict[str, None] = {}  # some replica may lack them

    def placed(self, trajectory: str, group: str, replica: int) -> None:
        """A turn goes to this replica."""
        if replica in self._up:
            known = self._entry(trajectory, group)
            known.place = replica
            self._running.setdefault(group, set()).add(trajectory)

    def finished(self, trajectory: str, group: str, replica: int, tokens: int) -> None:
        """A turn finished on this replica, and the whole text is so many tokens long now."""
        if replica not in self._up:
            return  # it died with what it knew
        known = self._entry(trajectory, group)
        known.home = replica
        known.learn(replica, tokens)
        for waiting in (self._fresh, self._due):
            waiting.pop(trajectory, None)
            waiting[trajectory] = None
        self._known.move_to_end(trajectory)

    def ended(self, trajectory: str, tokens: int) -> None:
        """No further turn will come, and these are its tokens, not one more; unknown names are ignored."""
        known = self._known.get(trajectory)
        if known is not None:
            for lengths in (known.at, known.promised):
                lengths.update({replica: min(length, tokens) for replica, length in lengths.items()})
            self._stop(trajectory, known)

    def lost(self, replica: int) -> None:
        """The replica and all it knew are gone; nothing is sent there until `seed`."""
        self._up.discard(replica)
        self._born[replica] = self._batches
        for name, known in self._known.items():
            known.promised.pop(replica, None)
            if known.at.pop(replica, None) and not known.is_told(self._up):
                self._due[name] = None  # it had more, too much for a batch, than what others can pass on now
            if known.place == replica:
                known.place = None

    def arrived(self, batch: Batch, replica: int) -> None:
        """The replica took the batch in, and can pass on what was in it."""
        for name, length in self._still_meant(batch, replica):
            known = self._known[name]
            known.learn(replica, length)
            if not known.is_told(self._up):
                self._due[name] = None

    def failed(self, batch: Batch, replica: int) -> None:
        """The batch may not have arrived there: the next exchange sends what it held again."""
        for name, length in self._still_meant(batch, replica):
            known = self._known[name]
            if known.promised.get(replica, 0) <= length:  # else a later batch promised more
                known.promised[replica] = known.at.get(replica, 0)
                self._due[name] = None

    def _still_meant(self, batch: Batch, replica: int) -> Iterator[tuple[str, int]]:
        """Lengths in a batch of the trajectories that are remembered; none if the replica died since."""
        if replica in self._up and batch.number > self._born[replica]:
            for name, length in batch.lengths.items():
                if name in self._known:
                    yield name, length

    def live(self) -> list[Batch]:
        """Turns that finished since the last call, to the replicas that run their siblings; one batch a way.

        What does not fit into it waits for the end of the step.
        """
        fresh, self._fresh = self._fresh, {}
        batches = []
        for way, names in self._ways(fresh, self._siblings).items():
            chosen: dict[str, int] = {}
            room = self._max_batch_tokens
            for name, length in reversed(names.items()):
                if length <= room:
                    chosen[name] = length
                    room -= length
                elif length <= self._max_batch_tokens:
                    room = 0  # what is older than one that finds no room is left out with it
            self.dropped += len(names) - len(chosen)
            batches += self._send(*way, dict(reversed(chosen.items())))
        return batches

    def end_step(self) -> list[Batch]:
        """A step is over, and nothing runs: everything goes to all who lack it."""
        for group in list(self._running):
            for name in list(self._running[group]):
                self._stop(name, self._known[name])
        due, self._due, self._fresh = self._due, {}, {}
        return self._in_batches(due, lambda name, known: self._up)

    def seed(self, replica: int) -> list[Batch]:
        """The replica is there and empty, as after a restart: all that its peers know goes there."""
        self.lost(replica)
        self._up.add(replica)
        return self._in_batches(self._known, lambda name, known: {replica})

    def check_integrity(self) -> None:
        """Raise AssertionError, with the reason, if the books contradict each other."""
        if len(self._known) > self._max_names:
            raise AssertionError("exchange: more names than the bound")
        if not (self._due.keys() | self._fresh.keys()) <= self._known.keys():
            raise AssertionError("exchange: a name waits that is not known")
        for group, names in self._running.items():
            if {name for name in names if name in self._known and self._known[name].group == group} != names:
                raise AssertionError(f"exchange: the members of group {group} do not add up")
        for name, known in self._known.items():
            if not (known.at.keys() | known.promised.keys()) <= self._up:
                raise AssertionError(f"exchange: a lost replica knows {name}")
            if any(tokens > known.promised.get(each, 0) for each, tokens in known.at.items()):
                raise AssertionError(f"exchange: less of {name} is promised than known")
            length = max(known.at.values(), default=0)
            if not (known.is_told(self._up) or name in self._due or length > self._max_batch_tokens):
                raise AssertionError(f"exchange: {name} is not known everywhere, and not due")

    def _entry(self, trajectory: str, group: str) -> _Known:
        """What is known of a trajectory; a new one may push out the one that is longest unchanged."""
        known = self._known.get(trajectory)
        if known is None:
            if len(self._known) >= self._max_names:
                self._forget(next(iter(self._known)))
            known = self._known[trajectory] = _Known(group)
        return known

    def _forget(self, trajectory: str) -> None:
        self._stop(trajectory, self._known[trajectory])
        del self._known[trajectory]
        self._fresh.pop(trajectory, None)
        if trajectory in self._due:
            del self._due[trajectory]
            self.dropped += 1

    def _stop(self, trajectory: str, known: _Known) -> None:
        known.place = None
        names = self._running.get(known.group, set())
        names.discard(trajectory)
        if not names:
            self._running.pop(known.group, None)

    def _siblings(self, trajectory: str, known: _Known) -> set[int]:
        """Replicas where siblings that have not ended had their last turn, or are about to have one."""
        siblings = self._running.get(known.group, set()) - {trajectory}
        return {place for name in siblings if (place := self._known[name].place) is not None}

    def _ways(
        self, names: Iterable[str], listeners: Callable[[str, _Known], set[int]]
    ) -> dict[tuple[int, tuple[int, ...]], dict[str, int]]:
        """Lengths of the trajectories that somebody lacks, by source and targets."""
        ways: dict[tuple[int, tuple[int, ...]], dict[str, int]] = {}
        for name in names:
            known = self._known[name]
            length = max(known.at.values(), default=0)
            lacking = (each for each in listeners(name, known) if known.promised.get(each, 0) < length)
            targets = tuple(sorted(lacking))
            if targets:
                source = _source(known, length)
                ways.setdefault((source, targets), {})[name] = length
        return ways

    def _in_batches(self, names: Iterable[str], listeners: Callable[[str, _Known], set[int]]) -> list[Batch]:
        """All that somebody lacks, in as many batches as that takes."""
        batches = []
        for way, lengths in self._ways(names, listeners).items():
            chosen: dict[str, int] = {}
            room = self._max_batch_tokens
            for name, length in lengths.items():
                if length > self._max_batch_tokens:
                    self.dropped += 1
                    continue
                if length > room:
                    batches += self._send(*way, chosen)
                    chosen, room = {}, self._max_batch_tokens
                chosen[name] = length
                room -= length
            batches += self._send(*way, chosen)
        return batches

    def _send(self, source: int, targets: tuple[int, ...], lengths: dict[str, int]) -> list[Batch]:
        """Write a batch into the books; none if there is nothing in it."""
        if not lengths:
            return []
        for name, length in lengths.items():
            self._known[name].promised.update(dict.fromkeys(targets, length))
        self._batches += 1
        return [Batch(source, targets, lengths, self._batches)]


def _source(known: _Known, length: int) -> int:
    """A replica that knows so much of it: if it does, the one it ran on last, which has it at first hand."""
    able = [replica for replica, tokens in known.at.items() if tokens == length]
    return known.home if known.home in able else min(able)
