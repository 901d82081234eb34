from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from nemo_rl.experience.failures import NoHealthyShards


@dataclass
class FleetHealthPolicy:
    unhealthy_threshold: int = 3


class GenerationFleetHealth:
    def __init__(self, *, shard_count: int, policy: FleetHealthPolicy) -> None:
        self._policy, self._failures = policy, Counter(dict.fromkeys(range(shard_count), 0))
        self._dead: set[int] = set()

    @property
    def shard_count(self) -> int:
        return len(self._failures)

    def serving_shards(self) -> list[int]:
        return [shard for shard in self._failures if shard not in self._dead]

    def report_failure(self, shard_idx: int, error: BaseException) -> None:
        self._failures[shard_idx] += 1
        if self._failures[shard_idx] >= self._policy.unhealthy_threshold:
            self._dead.add(shard_idx)

    def report_success(self, shard_idx: int) -> None:
        self._failures[shard_idx] = 0

    def report_refit(self, shard_idx: int, *, weight_version: int) -> None:
        self._dead.discard(shard_idx)
        self.report_success(shard_idx)


class HealthyShardSelector:
    def __init__(self, monitor: GenerationFleetHealth) -> None:
        self.monitor = monitor
        self._inflight: Counter[int] = Counter()

    def next_shard(self) -> int:
        serving = self.monitor.serving_shards()
        if not serving:
            raise NoHealthyShards("no shard serves")
        return min(serving, key=self.inflight)

    def acquire(self, shard_idx: int) -> None:
        self._inflight[shard_idx] += 1

    def release(self, shard_idx: int) -> None:
        self._inflight[shard_idx] -= 1

    def inflight(self, shard_idx: int) -> Any:
        return self._inflight[shard_idx]
