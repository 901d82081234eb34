"""The drafter inside a vLLM engine: `speculative_config.method = "custom_class"`.

vLLM calls `propose` after each forward pass with what was sampled. Identity does not
come with the call; it is read from the model runner, which the worker extension hands
over after start (`attach`). The proposer keeps the history up to date, asks it for
drafts and the pricer what they are worth, times the steps and counts. An error in here
costs speed, never a request: it is counted, logged once, and the step decodes plainly.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_war.config import SpeculativeConfig
from nemo_war.errors import UserError
from nemo_war.generation.step_time import StepLoad, StepTimeModel
from nemo_war.metadata import TurnMetadata
from nemo_war.speculative import learned
from nemo_war.speculative.archive import decode, encode
from nemo_war.speculative.history import SuffixHistory, warm_up
from nemo_war.speculative.pricing import DraftPricer

SETTINGS = "war"
"""Key of `VllmConfig.additional_config` under which the settings reach the engine process."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DraftCounters:
    """What the drafter did since the start; see `telemetry.records.ReplicaRecord`."""

    engine_steps: int = 0
    speculating_steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    draft_seconds: float = 0.0
    errors: int = 0


@dataclass(slots=True)
class _LiveTurn:
    """A request in the engine: its place in the history and where its tokens must end."""

    trajectory: str
    slot: int
    length: int
    limit: int
    stops: frozenset[int]
    first_stop: int
    critical: bool
    ended: bool = False

    def advance(self, tokens: np.ndarray, length: int) -> np.ndarray:
        """The new tokens that are output: none after a stop token or beyond the limit, draft or not."""
        start, end = self.length, min(length, self.limit)
        for position in range(max(start, self.first_stop), end):
            if int(tokens[position]) in self.stops:
                end = position + 1
                self.ended = True
                break
        self.ended = self.ended or end >= self.limit
        self.length = max(start, end)
        return tokens[start : self.length]


class SuffixProposer:
    """Drafts from the suffixes of finished and running trajectories.

    Attributes:
        drafts: whether this rank's drafts count; where not, nothing is learned either.
        enabled: whether to draft now; the history keeps learning.
        history, step_time, pricer, counters: what it is made of.
        workarounds: names of the workarounds for vLLM that are in force.
    """

    def __init__(self, vllm_config: Any) -> None:
        from nemo_war.compat import apply_to_engine

        settings = SpeculativeConfig.model_validate(vllm_config.additional_config[SETTINGS])
        self.workarounds = apply_to_engine()
        self.counters = DraftCounters()
        self.enabled = True
        self.step_time = StepTimeModel(settings.step_time_prior)
        self.pricer = DraftPricer(self.step_time, settings.max_running)
        self._last_start: float | None = None
        # The scheduler takes drafts from the output rank only, the first of its tensor-parallel group.
        parallel = vllm_config.parallel_config
        self.drafts = parallel.rank % parallel.tensor_parallel_size == 0
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._max_draft = vllm_config.speculative_config.num_speculative_tokens
        self._max_model_len = vllm_config.model_config.max_model_len
        self._runner: Any = None
        self._live: dict[str, _LiveTurn] = {}
        self._epoch = 0
        warm_up()  # compile now, not in front of the first request
        self.history = SuffixHistory(
            max_tokens=settings.history.max_tokens if self.drafts else 0,
            max_draft=self._max_draft,
            max_epochs=settings.history.max_epochs,
            max_group_tokens=settings.history.max_group_tokens,
        )

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """There is no draft model; vLLM calls this for every drafter."""

    def attach(self, runner: Any) -> None:
        """Take the model runner, the source of request identity. Kept whole: its batch may be rebuilt."""
        self._runner = runner

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft for the next step.

        Args:
            sampled_token_ids: per row, the tokens this step sampled; empty for a row
                whose prompt is not computed in full yet.
            num_tokens_no_spec: [rows] prompt and output tokens so far, this step's included.
            token_ids_cpu: [rows, max_model_len] those tokens.
            slot_mappings: unused; part of vLLM's interface.

        Returns:
            Per row, the draft; empty for none.
        """
        if not self.drafts:
            return [[] for _ in sampled_token_ids]
        started = time.perf_counter()
        try:
            return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, started)
        except Exception:
            if not self.counters.errors:
                _log.exception("drafting failed; decoding goes on without drafts (logged once, then counted)")
            self.counters.errors += 1
            self._last_start = None
            return [[] for _ in sampled_token_ids]
        finally:
            self.counters.draft_seconds += time.perf_counter() - started

    def _propose(
        self, sampled: list[list[int]], lengths: np.ndarray, token_ids: np.ndarray, now: float
    ) -> list[list[int]]:
        if self._runner is None:
            raise RuntimeError("the proposer was never attached to its model runner")
        batch = self._runner.input_batch
        rows = [row for row, new in enumerate(sampled) if new]
        self._retire()
        self._time(len(sampled), batch.spec_token_ids, lengths, now)
        turns, added = self._follow(rows, token_ids, lengths)
        self._count(rows, sampled, batch.spec_token_ids, added)
        going_on = [row for row in rows if not turns[row].ended]
        # A step is timed from one call to the next; with no request left the engine may idle in between.
        self._last_start = now if len(going_on) + len(sampled) - len(rows) else None
        drafts: list[list[int]] = [[] for _ in sampled]
        if self.enabled and going_on and self.pricer.wants(len(sampled)):
            load = StepLoad(len(going_on), len(going_on), int(sum(lengths[row] for row in going_on)))
            for row, draft in zip(going_on, self._draft([turns[row] for row in going_on], load), strict=True):
                drafts[row] = draft
        return drafts

    def _time(self, requests: int, verified: list[list[int]], lengths: np.ndarray, now: float) -> None:
        """Tell the step-time model what the step that just ended computed, and how long it took."""
        if self._last_start is None:
            return
        tokens = int(self._runner.query_start_loc.np[requests])
        drafts = sum(map(len, verified[:requests]))
        load = StepLoad(requests, tokens, int(lengths[:requests].sum()), drafts)
        self.step_time.observe(load, 1000 * (now - self._last_start))

    def _retire(self) -> None:
        """Requests that the runner no longer knows are over; preempted ones it still knows."""
        for request in [request for request in self._live if request not in self._runner.requests]:
            self.history.end(self._live.pop(request).slot)

    def _count(
        self, rows: list[int], sampled: list[list[int]], verified: list[list[int]], added: np.ndarray
    ) -> None:
        """Count what became of the drafts that this step verified; the history learns by itself.

        Accepted tokens behind the end of the output are not output, and count as wasted.
        """
        counters = self.counters
        counters.engine_steps += bool(rows)
        outcomes = [
            (len(verified[row]), min(len(sampled[row]) - 1, int(new)))
            for row, new in zip(rows, added, strict=True)
            if verified[row]
        ]
        counters.speculating_steps += bool(outcomes)
        verified_tokens = sum(proposed for proposed, _ in outcomes)
        accepted_tokens = sum(accepted for _, accepted in outcomes)
        counters.drafts += len(outcomes)
        counters.draft_tokens += verified_tokens
        counters.accepted_tokens += accepted_tokens
        self.pricer.settle(verified_tokens, accepted_tokens)

    def _follow(
        self, rows: list[int], token_ids: np.ndarray, lengths: np.ndarray
    ) -> tuple[dict[int, _LiveTurn], np.ndarray]:
        """Bring the history up to the rows' tokens.

        Returns:
            The rows' turns, and int32[rows], how many tokens of output each gained.
        """
        turns: dict[int, _LiveTurn] = {}
        news: list[np.ndarray] = []
        for row in rows:
            request = self._runner.input_batch.req_ids[row]
            turn = self._live.get(request)
            if turn is None:
                turn = self._live[request] = self._begin(request, token_ids[row])
            news.append(turn.advance(token_ids[row], int(lengths[row])))
            turns[row] = turn
        counts = np.array([len(new) for new in news], dtype=np.int32)
        padded = np.zeros((len(rows), max(counts, default=0)), dtype=np.int32)
        for i, new in enumerate(news):
            padded[i, : len(new)] = new
        self.history.extend(np.array([turns[row].slot for row in rows], dtype=np.int32), padded, counts)
        return turns, counts

    def _begin(self, request: str, tokens: np.ndarray) -> _LiveTurn:
        state = self._runner.requests[request]
        params = state.sampling_params
        metadata = TurnMetadata.from_extra_args(params.extra_args)
        if metadata is None:  # a client that says nothing about itself: its own tokens still help it
            metadata = TurnMetadata(trajectory=request, group=request, learn=False)
        trajectory = metadata.trajectory
        if any(turn.trajectory == trajectory for turn in self._live.values()):
            trajectory = f"{trajectory}/{request}"  # `n` > 1, or a careless client: one place each
        prompt = state.num_prompt_tokens
        slot = self.history.begin(
            trajectory, metadata.group, metadata.epoch, tokens[:prompt], learn=metadata.learn
        )
        limit = min(prompt + (params.max_tokens or self._max_model_len), self._max_model_len)
        stops = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else frozenset(params.all_stop_token_ids)
        )
        return _LiveTurn(
            trajectory, slot, prompt, limit, stops, prompt + params.min_tokens, metadata.critical
        )

    def _draft(self, turns: list[_LiveTurn], load: StepLoad) -> list[list[int]]:
        """Drafts as long as they are worth it; each step samples one more token than it accepts."""
        slots = np.array([turn.slot for turn in turns], dtype=np.int32)
        budgets = np.array(
            [min(self._max_draft, turn.limit - turn.length - 1) for turn in turns], dtype=np.int32
        )
        drafts = self.history.draft(slots, budgets, self._epoch)
        critical = np.array([turn.critical for turn in turns])
        lengths = self.pricer.choose(load, drafts.survival, drafts.lengths, critical)
        return [drafts.tokens[i, : lengths[i]].tolist() for i in range(len(turns))]

    def advance_epoch(self, epoch: int) -> None:
        """The policy was updated: KV is void, the statistics carry over."""
        self._epoch = epoch
        self.history.advance_epoch(epoch)

    def commit(self, lengths: dict[str, int]) -> None:
        """The host says how long trajectories really are, stop strings cut off."""
        for trajectory, length in lengths.items():
            self.history.cut(trajectory, length)

    def save(self, path: str) -> None:
        """Keep the history in a file; a disk that is full costs the next run speed, not this one its life."""
        if not self.drafts:
            return
        try:
            self.history.save(path)
        except OSError as error:
            if not self.counters.errors:
                _log.warning("the history was not kept in %s: %s (logged once, then counted)", path, error)
            self.counters.errors += 1

    def restore(self, path: str, empty_if_damaged: bool) -> int:
        """Learn what an earlier run kept; return how many trajectories.

        Raises:
            UserError: see `SuffixHistory.load`, unless an empty history will do.
        """
        if not self.drafts:
            return 0
        try:
            return self.history.load(path, self._vocabulary, self._epoch)
        except UserError as error:
            if not empty_if_damaged:
                raise
            _log.warning("%s; this run starts with an empty history, as configured", error)
            return 0

    def save_learned(self, stem: str) -> None:
        """Write all that was learned, for this run to be resumed with; see `learned`.

        Raises:
            OSError: it could not be written.
        """
        if self.drafts:
            learned.save(stem, self.history, self._tables())

    def restore_learned(self, stem: str) -> None:
        """Go on with what this run had learned when it was interrupted.

        Raises:
            UserError: see `learned.restore`.
        """
        if self.drafts:
            learned.restore(stem, self.history, self._tables(), self._vocabulary)

    def _tables(self) -> learned.Tables:
        return learned.Tables(self.history.calibration, self.step_time, self.pricer)

    def export_history(self, path: str, lengths: dict[str, int] | None) -> int:
        """Write what others may learn into a file in memory.

        Args:
            path: the file; it exists and is empty.
            lengths: these trajectories, each cut to this many tokens, since only the host knows
                where a stop string ended the text; None: all as they are.

        Returns:
            How many trajectories were written; with none the file stays empty.
        """
        if not self.drafts:
            return 0
        self._retire()
        sequences = self.history.export_sequences(lengths).cut(lengths or {})
        if sequences.trajectories:
            Path(path).write_bytes(encode(sequences))
        return len(sequences.trajectories)

    def import_history(self, path: str) -> int:
        """Learn what another replica exported; return how many trajectories were news.

        Raises:
            UserError: it is damaged, or of another model. Nothing was learned then.
        """
        if not self.drafts:
            return 0
        sequences = decode(Path(path).read_bytes(), "of another replica")
        sequences.check_vocabulary(self._vocabulary, "of another replica")
        self._retire()  # a turn that is over is no reason to leave its trajectory alone
        return self.history.import_sequences(sequences)

    def clear_history(self) -> None:
        """Start from nothing; running turns enter the new history with their next token."""
        self._live.clear()
        self.history.clear()

    def statistics(self) -> dict[str, Any]:
        """Counters since the start, and what the history holds now."""
        held = self.history.stats()
        return asdict(self.counters) | {"history_tokens": held.tokens, "history_epochs": held.epochs}
