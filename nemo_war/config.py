"""The `policy.generation.war` block of a NeMo-RL configuration.

This module imports neither torch, ray nor vllm, so that a login node can check a
recipe. Nothing after it reads raw dicts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

MAX_DRAFT_TOKENS = 64

AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().resolve())]
"""A path that other processes will open too, wherever they run and wherever its links point by then."""


class StrictModel(BaseModel):
    """A block of the configuration: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


ExchangeMoment = Annotated[
    Literal["step", "live", "off"], BeforeValidator(lambda value: "off" if value is False else value)
]
"""YAML takes a bare `off` for false."""


class ExchangeConfig(StrictModel):
    """What replicas tell each other of their histories."""

    when: ExchangeMoment = Field(
        "step",
        description="step: everything, at the end of a step. live: finished turns to the replicas that "
        "run siblings, too. off: never.",
    )
    interval_s: float = Field(1.0, gt=0, description="Live only: seconds from one exchange to the next.")
    max_tokens_per_batch: int = Field(
        262_144,
        ge=1024,
        description="Tokens that travel at once; a longer trajectory is not shared. An engine takes "
        "100,000 tokens in within some 10 ms, and stands still for them.",
    )
    timeout_s: float = Field(
        10.0, gt=0, description="Longest an exchange may take; what has not arrived by then is left out."
    )


class HistoryConfig(StrictModel):
    """Which tokens a replica remembers as drafts for later turns."""

    max_tokens: int = Field(
        4_000_000,
        ge=1024,
        le=1 << 29,
        description="Tokens kept per replica, 26 bytes each; the oldest trajectories go first.",
    )
    max_epochs: int | None = Field(
        None, ge=1, description="Forget trajectories older than this many policy epochs."
    )
    max_group_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of max_tokens for a group's ended trajectories; a shared prompt counts in each.",
    )
    restore: AbsolutePath | None = Field(
        None, description="History to start with: a file, or the folder of a run that kept one."
    )
    empty_if_damaged: bool = Field(
        False, description="Start with an empty history where `restore` is missing or damaged; false: fail."
    )
    exchange: ExchangeConfig = ExchangeConfig()

    @property
    def max_group_tokens(self) -> int | None:
        """`max_group_share` in tokens."""
        return None if self.max_group_share is None else int(self.max_group_share * self.max_tokens)


class StepTimePrior(StrictModel):
    """What an engine step is believed to take before any was measured, in milliseconds.

    The default is a 30B model on two H100; it is outweighed within a second of decoding.
    """

    base: float = Field(15.0, ge=0, description="Any step.")
    per_request: float = Field(0.05, ge=0, description="Each request in it.")
    per_token: float = Field(0.02, ge=0, description="Each token computed, drafted ones included.")
    per_draft_token: float = Field(0.01, ge=0, description="Each draft token on top, to sample from it.")
    per_kilotoken: float = Field(0.02, ge=0, description="Each thousand tokens of context attended to.")
    speculating: float = Field(0.5, ge=0, description="Verifying any draft at all.")
    speculating_per_request: float = Field(
        0.02, ge=0, description="Each request of a step that verifies drafts, its own or others'."
    )


class SpeculativeConfig(StrictModel):
    """Suffix decoding: completed and running trajectories are the drafts."""

    enabled: bool = Field(True, description="False leaves vLLM's engine as it is: no proposer, no history.")
    max_draft_tokens: int = Field(
        12, ge=1, le=MAX_DRAFT_TOKENS, description="Longest draft of one request in one step."
    )
    max_running: int | None = Field(
        None,
        ge=0,
        description="For ablations, instead of the price: draft in full up to so many running requests.",
    )
    step_time_prior: StepTimePrior = StepTimePrior()
    history: HistoryConfig = HistoryConfig()


PolicyName = Literal["war", "sticky", "least_outstanding", "round_robin", "consistent_hash", "published"]


class RoutingConfig(StrictModel):
    """Which replica serves a turn."""

    policy: PolicyName = Field(
        "war",
        description="war: by KV, siblings, progress and load, admitting what the KV caches hold. "
        "sticky: all turns of a trajectory on one replica. The others are to compare with.",
    )
    seed: int = Field(0, ge=0, description="Breaks ties between equally loaded replicas.")
    shared: bool = Field(
        False,
        description="true: the scheduler is a Ray actor of its own, as it must be where several processes "
        "place turns. While it does not answer, turns are placed by consistent hashing.",
    )


class RefitConfig(StrictModel):
    """What happens to running requests when the weights change, and for how long we wait."""

    in_flight: Literal["drain", "pause", "abort"] = Field(
        "drain",
        description="drain: running turns finish first. pause: they freeze, and go on under the new weights. "
        "abort: they are taken back, and generated again under the new weights.",
    )
    on_failure: Literal["fail", "continue"] = Field(
        "fail",
        description="When a replica does not get the weights, or does not confirm its reset. fail: the step "
        "fails. continue: the others go on, and that one is fenced off until it has.",
    )
    drain_timeout_s: float = Field(
        300.0, gt=0, description="Longest wait for running turns to finish or freeze."
    )
    update_timeout_s: float = Field(
        300.0, gt=0, description="Longest wait for a replica to load weights and reset its caches."
    )
    self_check: bool = Field(
        False,
        description="true: after each refit all replicas answer one prompt, with and without cached KV, "
        "before turns are placed. One that says something else is fenced off, or the step fails: see "
        "on_failure. Costs two prefills of 64 tokens.",
    )
    self_check_tolerance: float = Field(
        0.05,
        gt=0,
        description="Differences of logprobs, in nats, that are taken for rounding. Running turns, with "
        "pause, share the batch and round differently.",
    )


class HealthConfig(StrictModel):
    """When a replica counts as lost, and how often it is brought back."""

    probe_interval_s: float = Field(10.0, gt=0, description="Time between two probes of a replica.")
    probe_timeout_s: float = Field(
        120.0,
        gt=0,
        description="A replica that has not answered by then is lost; no engine step takes as long.",
    )
    max_restarts: int = Field(
        3, ge=0, description="Restarts of a replica in a row, without one turn answered; then it stays away."
    )


class WarConfig(StrictModel):
    """`policy.generation.war`."""

    enabled: bool = Field(True, description="False: stock behaviour, nothing of WAR is loaded.")
    speculative: SpeculativeConfig = SpeculativeConfig()
    routing: RoutingConfig = RoutingConfig()
    refit: RefitConfig = RefitConfig()
    health: HealthConfig = HealthConfig()
    ab_every: int | None = Field(
        None, ge=1, description="In-job A/B: switch WAR off and on again every this many steps."
    )
