"""What a run writes down: frozen records, raw facts only.

One JSON object a line in `events.jsonl`, its `kind` naming the class. Judgement
(rates, ratios, medians) belongs to `nemo_war.report`, the one consumer. Times are
seconds on the run's own monotonic clock, zero at its start.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Pass:
    """Which pass over which work a record belongs to.

    Attributes:
        mode: `baseline`, `sticky` or `war`.
        phase: `live` (sampled text decides the work), `fixed` (replayed work, the
            only one a speed-up may be taken from) or `validation`.
        repeat: 0 for live; the repetition of the fixed work otherwise.
    """

    mode: str
    phase: str
    repeat: int = 0


@dataclass(frozen=True, slots=True)
class BeginRecord:
    """A live pass begins, so that a reader knows what is missing where it was stopped.

    Attributes:
        steps: that it is to have done in the end, earlier processes' among them.
    """

    run: Pass
    steps: int


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One engine request.

    Attributes:
        epoch: policy epoch that it began under.
        cached_tokens: those of its `prompt_tokens` that came from the prefix cache.
        mixed: it ended under a later epoch, as it was frozen during a refit.
    """

    run: Pass
    step: int
    epoch: int
    trajectory: str
    group: str
    turn: int
    replica: int
    start_s: float
    first_token_s: float
    end_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    error: str | None = None
    mixed: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """What one replica's drafter did during one step.

    Attributes:
        engine_steps: forward passes that sampled at least one token.
        speculating_steps: those of them that verified at least one draft token.
        drafts: drafts verified (one request in one engine step).
        draft_tokens: draft tokens verified.
        accepted_tokens: draft tokens accepted; 1 + accepted_tokens / drafts is the
            acceptance length, bonus token included.
        draft_seconds: time spent in the proposer.
        errors: drafting calls that failed and fell back to plain decoding.
        history_tokens: tokens the history holds at the end of the step.
        history_epochs: distinct policy epochs among them.
    """

    run: Pass
    step: int
    replica: int
    engine_steps: int = 0
    speculating_steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft_seconds: float = 0.0
    errors: int = 0
    history_tokens: int = 0
    history_epochs: int = 0


@dataclass(frozen=True, slots=True)
class ReliabilityRecord:
    """One point of a drafter's reliability curve: a decile of the predicted acceptance.

    Attributes:
        predicted: mean prediction for the draft tokens in it.
        observed: share of them that were right.
        draft_tokens: how many they were since the run's start, verified or not; those behind a wrong
            one are not counted.
    """

    run: Pass
    step: int
    replica: int
    predicted: float
    observed: float
    draft_tokens: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One GRPO step.

    Attributes:
        rollout_s: the makespan: first request to last answer.
        mixed: trajectories that were generated under more than one policy epoch.
    """

    run: Pass
    step: int
    epoch: int
    rollout_s: float
    train_s: float
    refit_s: float
    trajectories: int
    turns: int
    prompt_tokens: int
    output_tokens: int
    truncations: int
    errors: int
    reward_mean: float
    loss: float | None = None
    grad_norm: float | None = None
    logprob_error: float | None = None
    war_active: bool = True
    mixed: int = 0


@dataclass(frozen=True, slots=True)
class RefitRecord:
    """One weight update over the fleet, with each replica's own word on its cache reset.

    Attributes:
        replicas: those that took part to the end.
        fenced: those that are fenced off now.
        self_check_s: of `seconds`, what `refit.self_check` took; 0 without it.
    """

    run: Pass
    epoch: int
    replicas: int
    kv_reset_ok: bool
    seconds: float
    transfer_bytes: int
    in_flight: int
    fenced: int = 0
    self_check_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TransitionRecord:
    """One transition of a fleet's refit cycle, or of one replica's part in it; see `generation.refit`.

    Attributes:
        fleet: `war` or `stock`.
        replica: its number; None where the whole fleet's phase changed.
        epoch: policy epoch of the fleet.
        reason: why a replica was fenced off or a refit failed; else empty.
    """

    fleet: str
    at_s: float
    replica: int | None
    before: str
    after: str
    epoch: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResumeRecord:
    """This run goes on where an earlier process stopped.

    Attributes:
        step: the first step of this process, as steps are counted in these records: so many were done.
        epoch: policy epoch of the weights it goes on with.
        weights_digest: blake2b of those weights as the replicas get them.
        checkpoint: folder they come from.
    """

    run: Pass
    step: int
    epoch: int
    weights_digest: str
    checkpoint: str


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """One attempt to save a checkpoint.

    Attributes:
        step: steps that are done.
        seconds: how long it took, or until it failed.
        error: why nothing of it is there; empty where it was saved.
    """

    run: Pass
    step: int
    seconds: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class ExchangeRecord:
    """One exchange of history between the replicas.

    Attributes:
        when: `live` (during the step), `step` (at its end, outside of the makespan), or `seed` (a
            replica came back).
        batches: batches that were sent.
        tokens: of the trajectories in them, however many replicas took them in.
        seconds: from the decision to the last answer.
        failed: batches that did not reach all replicas; what was in them comes again.
        dropped: trajectories left out, as they or the names remembered were beyond a bound.
    """

    run: Pass
    step: int
    when: str
    batches: int
    tokens: int
    seconds: float
    failed: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class OutageRecord:
    """What of a step was done without its scheduler, where that is shared; see `SharedDispatcher`.

    Attributes:
        fallbacks: turns that were placed by consistent hashing instead.
        outages: times the scheduler went away.
        seconds_out: how long it was away, all outages together.
        reason: of the last of these turns; empty where there was none.
    """

    run: Pass
    step: int
    fallbacks: int = 0
    outages: int = 0
    seconds_out: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobReplicaRecord:
    """What one replica of a NeMo-RL job did during one step.

    Attributes:
        step: steps since this process started.
        epoch: policy epoch at its end, a count of weight updates.
        active: WAR drafted and placed turns; false in an arm of an in-job A/B that goes without.
        turns: requests that were answered.
        mixed_turns: of these, those that began under one policy epoch and ended under another.
        prompt_tokens: of them.
        cached_tokens: of these, those whose KV was there.
        output_tokens: generated.
        busy_seconds: time with any request under way.
        engine_steps, speculating_steps, drafts, draft_tokens, accepted_tokens, draft_seconds, errors: see
            `ReplicaRecord`.
        imported_trajectories: learned from other replicas.
        history_tokens: tokens the history holds at the end of the step.
    """

    step: int
    epoch: int
    replica: int
    active: bool
    turns: int = 0
    mixed_turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    busy_seconds: float = 0.0
    engine_steps: int = 0
    speculating_steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft_seconds: float = 0.0
    errors: int = 0
    imported_trajectories: int = 0
    history_tokens: int = 0


Record = (
    BeginRecord
    | TurnRecord
    | ReplicaRecord
    | ReliabilityRecord
    | StepRecord
    | RefitRecord
    | TransitionRecord
    | ResumeRecord
    | CheckpointRecord
    | ExchangeRecord
    | OutageRecord
    | JobReplicaRecord
)
