"""Computes a step: KV remembers the weights, tokens come from the made-up model, drafts are verified."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.chaos_bench.faults import Faults
from tools.chaos_bench.model import Context, digest_of, digest_of_folder, logprob, next_token
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.v1.core.sched.scheduler import Sampled, ScheduledRequest, SchedulerOutput
from vllm.v1.worker.input_batch import CachedRequestState, InputBatch


@dataclass
class Model:
    """The weights, as their digest."""

    weights: str


@dataclass(frozen=True)
class KVCacheConfig:
    """Size of the cache."""

    num_blocks: int


@dataclass(frozen=True)
class Buffer:
    """An array that vLLM also has on the device; `np` is all that is read here."""

    np: np.ndarray


class ModelRunner:
    """What a worker extension and a drafter see of an engine.

    Attributes:
        requests: all that are not known to be over.
        input_batch: the rows of the last step.
        query_start_loc: int32[rows + 1], where each row's tokens begin among those computed.
        kv_cache_config: of the cache.
        drafter: the configured one; None without.
        drafts: by request, for the next step.
    """

    def __init__(self, config: VllmConfig, faults: Faults) -> None:
        self._config, self._faults = config, faults
        rows = config.scheduler_config.max_num_seqs
        self._model = Model(digest_of_folder(config.model_config.model))
        self.requests: dict[str, CachedRequestState] = {}
        self.input_batch = InputBatch(rows, config.model_config.max_model_len)
        self.query_start_loc = Buffer(np.zeros(rows + 1, np.int32))
        self.kv_cache_config = KVCacheConfig(config.cache_config.num_gpu_blocks)
        self.drafts: dict[str, list[int]] = {}
        speculative = config.speculative_config
        self.drafter = None if speculative is None else _drafter(speculative, config)

    def get_model(self) -> Model:
        return self._model

    def reload_weights(
        self, weights_iterator: Iterable[tuple[str, Any]], is_checkpoint_format: bool = True
    ) -> None:
        """Take new weights.

        A transfer that breaks off leaves neither the old weights nor the new ones, as in a real
        model, where each tensor is written as it comes.

        Args:
            weights_iterator: names and torch tensors.
            is_checkpoint_format: part of vLLM's interface.

        Raises:
            ValueError: there are none.
        """
        tensors = []
        for name, tensor in weights_iterator:
            tensors.append((name, _bytes(tensor)))
            if len(tensors) == 1:
                self._model.weights = digest_of([("old", self._model.weights.encode()), *tensors])
                self._faults.at("load")
        if not tensors:
            raise ValueError("there are no weights to load")
        self._model.weights = digest_of(tensors)

    def execute_model(self, step: SchedulerOutput) -> dict[str, Sampled]:
        """Compute a step and draft for the next one."""
        self._update(step)
        self.drafts = {}
        if not step.scheduled:
            return {}
        batch = self.input_batch
        parts = {each.request.request_id: each for each in step.scheduled}
        # In the schedule's order: a request may have found a block that one before it computes in this step.
        sampled = {name: self._compute(part) for name, part in parts.items()}
        for row, name in enumerate(batch.req_ids):
            batch.spec_token_ids[row] = parts[name].spec_token_ids
            batch.append(row, sampled[name].tokens)
            end = self.query_start_loc.np[row] + parts[name].num_tokens
            self.query_start_loc.np[row + 1] = end
        if self.drafter is not None:
            drafts = self.drafter.propose(
                [list(sampled[name].tokens) for name in batch.req_ids],
                batch.num_tokens_no_spec,
                batch.token_ids_cpu,
                slot_mappings=None,
            )
            self.drafts = dict(zip(batch.req_ids, drafts, strict=True))
        return sampled

    def _update(self, step: SchedulerOutput) -> None:
        """Forget what is over, and make the rows those of this step."""
        for name in step.finished_req_ids:
            self.requests.pop(name, None)
        new = []
        for each in step.scheduled:
            request = each.request
            if request.request_id not in self.requests:
                self.requests[request.request_id] = CachedRequestState(
                    request.request_id, request.num_prompt_tokens, request.params, request.seed,
                    list(request.tokens), Context(request.tokens),
                )  # fmt: skip
            if each.let_in:
                new.append(self.requests[request.request_id])
        kept = {each.request.request_id for each in step.scheduled if not each.let_in}
        for name in kept - set(self.input_batch.req_ids):  # it ran, and was left out of the last step
            new.append(self.requests[name])
        self.input_batch.replace(kept, new)

    def _compute(self, part: ScheduledRequest) -> Sampled:
        """Write the KV of a request's part of the step, and sample if it reaches the end of its tokens."""
        state, request = self.requests[part.request.request_id], part.request
        weights, size = self._model.weights, self._config.cache_config.block_size
        end = part.start + part.num_tokens
        held = request.blocks[: -(-end // size)]
        attended = frozenset({weights}).union(*(block.weights for block in held))
        for block in held[part.start // size :]:
            block.weights = attended
        sampled = Sampled([], [])
        if end < len(state.tokens):
            return sampled
        params, model = state.sampling_params, self._config.model_config
        for guess in (*part.spec_token_ids, None):
            early = len(state.tokens) - state.num_prompt_tokens < params.min_tokens
            banned = params.all_stop_token_ids if early else ()
            token = next_token(
                weights, state.seed, state.context, model.vocab_size, model.eos_token_id, banned
            )
            sampled.tokens.append(token)
            sampled.logprobs.append(logprob(weights, attended, state.context, token))
            state.append(token)
            if token != guess:
                break
        return sampled


def _drafter(speculative: SpeculativeConfig, config: VllmConfig) -> Any:
    module, _, name = speculative.model.rpartition(".")
    drafter = getattr(importlib.import_module(module), name)(config)
    drafter.load_model()
    return drafter


def _bytes(tensor: Any) -> bytes:
    import torch  # here and not above: whoever passes a tensor has loaded it already

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
