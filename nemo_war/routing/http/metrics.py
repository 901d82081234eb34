"""The router's figures for Prometheus; docs/router.md explains each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_PREFIX = "nemo_war_router_"
_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
"""From a router's own delay to a long generation."""


class Metrics:
    """One router's figures, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests, by path and status.", "path", "status")
        self.attempts = self._counter("attempts", "Requests sent to a replica.", "replica")
        self.failures = self._counter("attempt_failures", "Of these, not served.", "replica")
        self.losses = self._counter("replica_losses", "Times a replica was lost.", "replica")
        self.broken_streams = self._counter("broken_streams", "Streams that their replica did not finish.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, as replicas count them.")
        self.cached_tokens = self._counter("cached_tokens", "Of these, found in a replica's cache.")
        self.output_tokens = self._counter("output_tokens", "Tokens generated.")
        self.request_seconds = self._histogram("request_seconds", "Time to the end of an answer.", "path")
        self.wait_seconds = self._histogram("wait_seconds", "Time that turns waited for a replica.")

    def watch(self, name: str, purpose: str, value: Callable[[], float]) -> None:
        """Add a figure that is read when it is asked for."""
        Gauge(_PREFIX + name, purpose, registry=self._registry).set_function(value)

    def watch_replicas(self, name: str, purpose: str, count: int, value: Callable[[int], float]) -> None:
        """Add one such figure for each of `count` replicas."""
        family = Gauge(_PREFIX + name, purpose, ["replica"], registry=self._registry)
        for replica in range(count):
            family.labels(replica).set_function(partial(value, replica))

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self._registry)

    def counters(self) -> dict[str, float]:
        """All counters, those of a family added up, without prefix and `_total`."""
        return {
            family.name.removeprefix(_PREFIX): sum(
                sample.value for sample in family.samples if sample.name.endswith("_total")
            )
            for family in self._registry.collect()
            if family.type == "counter"
        }

    def by_label(self, counter: Counter, label: str) -> dict[str, float]:
        """A family's counts, added up by the values of a label."""
        counts: dict[str, float] = {}
        for family in counter.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    value = sample.labels[label]
                    counts[value] = counts.get(value, 0.0) + sample.value
        return counts

    def _counter(self, name: str, purpose: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, purpose, labels, registry=self._registry)

    def _histogram(self, name: str, purpose: str, *labels: str) -> Histogram:
        return Histogram(_PREFIX + name, purpose, labels, registry=self._registry, buckets=_SECONDS)
