"""Values of an embedded run's configuration that are right alone and wrong together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nemo_war.errors import ConfigError

if TYPE_CHECKING:
    from nemo_war.generation.embedded.config import RunConfig

MIN_PROMPT_TOKENS = 64
"""A chat template with a one-line task; no environment asks in fewer."""

_GENERATION = "policy.generation"
_ELSEWHERE = {
    "model": "policy.model_name",
    "tokenizer": "policy.tokenizer.name",
    "seed": "grpo.seed",
    "dtype": f"{_GENERATION}.vllm_cfg.precision",
    "tensor_parallel_size": f"{_GENERATION}.vllm_cfg.tensor_parallel_size",
    "pipeline_parallel_size": f"{_GENERATION}.vllm_cfg.pipeline_parallel_size",
    "enforce_eager": f"{_GENERATION}.vllm_cfg.enforce_eager",
    "max_model_len": f"{_GENERATION}.vllm_cfg.max_model_len",
    "speculative_config": f"{_GENERATION}.war.speculative",
}
"""Engine arguments that another key of the configuration decides."""
_OWNED = {
    "worker_extension_cls": "refits need WAR's own worker extension",
    "additional_config": "it carries WAR's settings to the drafter",
    "logprobs_mode": "the trainer needs logprobs of the distribution that was sampled",
    "disable_log_stats": "a run keeps its own records",
}
"""Engine arguments that an embedded replica sets itself, and why."""
_WITHOUT_DRAFTS = {
    "async_scheduling": "which vLLM schedules synchronously",
    "logits_processors": "which vLLM cannot combine with logits processors of one's own",
}
"""Engine arguments that vLLM cannot combine with speculation, and why."""


def conflicts(config: RunConfig) -> Iterator[ConfigError]:
    """Every conflict, the most likely to be meant first."""
    yield from _advantages(config)
    yield from _batches(config)
    yield from _lengths(config)
    yield from _engine_arguments(config)
    yield from _environments(config)
    yield from _comparison(config)


def _advantages(config: RunConfig) -> Iterator[ConfigError]:
    grpo = config.grpo
    if grpo.use_leave_one_out_baseline and grpo.num_generations_per_prompt < 2:
        yield ConfigError(
            "grpo.num_generations_per_prompt",
            grpo.num_generations_per_prompt,
            "allowed: at least 2 with a leave-one-out baseline, which is the mean of the siblings",
            "set grpo.num_generations_per_prompt=2 or grpo.use_leave_one_out_baseline=false",
        )
    if grpo.val_period and not grpo.max_val_samples:
        yield ConfigError(
            "grpo.max_val_samples",
            grpo.max_val_samples,
            f"allowed: at least 1 with grpo.val_period={grpo.val_period}",
            "set grpo.max_val_samples=8, for example, or grpo.val_period=0",
        )


def _batches(config: RunConfig) -> Iterator[ConfigError]:
    prompts = config.grpo.num_prompts_per_step
    rollouts = prompts * config.grpo.num_generations_per_prompt
    batch = config.policy.train_global_batch_size
    if batch is not None and batch != rollouts:
        yield ConfigError(
            "policy.train_global_batch_size",
            batch,
            f"allowed: {rollouts}, all trajectories of a step (prompts x generations)",
            f"set policy.train_global_batch_size={rollouts} or null",
        )
    if config.data.num_prompts % prompts:
        yield ConfigError(
            "data.num_prompts",
            config.data.num_prompts,
            f"allowed: a multiple of grpo.num_prompts_per_step={prompts}, so that no step has a prompt twice",
            f"set data.num_prompts={-(-config.data.num_prompts // prompts) * prompts}",
        )


def _lengths(config: RunConfig) -> Iterator[ConfigError]:
    generation, total = config.policy.generation, config.policy.max_total_sequence_length
    if generation.max_new_tokens + MIN_PROMPT_TOKENS > total:
        yield ConfigError(
            f"{_GENERATION}.max_new_tokens",
            generation.max_new_tokens,
            f"allowed: policy.max_total_sequence_length={total} less {MIN_PROMPT_TOKENS} (prompt) at most",
            f"set {_GENERATION}.max_new_tokens={total - MIN_PROMPT_TOKENS} or less",
        )
    if total > generation.vllm_cfg.max_model_len:
        yield ConfigError(
            "policy.max_total_sequence_length",
            total,
            f"allowed: at most {_GENERATION}.vllm_cfg.max_model_len={generation.vllm_cfg.max_model_len}",
            f"set {_GENERATION}.vllm_cfg.max_model_len={total}, or lower it",
        )


def _engine_arguments(config: RunConfig) -> Iterator[ConfigError]:
    war = config.policy.generation.war
    for name, value in config.policy.generation.vllm_kwargs.items():
        key = f"{_GENERATION}.vllm_kwargs.{name}"
        if name in _ELSEWHERE:
            allowed = f"allowed: other engine arguments; {_ELSEWHERE[name]} decides this one"
            yield ConfigError(key, value, allowed, f"remove it and set {_ELSEWHERE[name]}")
        elif name in _OWNED:
            yield ConfigError(key, value, f"allowed: other engine arguments; {_OWNED[name]}", f"remove {key}")
        elif name in _WITHOUT_DRAFTS and war.enabled and war.speculative.enabled:
            allowed = f"allowed: only without speculation, {_WITHOUT_DRAFTS[name]}"
            fix = f"remove it or set {_GENERATION}.war.speculative.enabled=false"
            yield ConfigError(key, value, allowed, fix)
    if war.ab_every is not None and not war.enabled:
        yield ConfigError(
            f"{_GENERATION}.war.ab_every",
            war.ab_every,
            f"allowed: null with {_GENERATION}.war.enabled=false",
            f"set {_GENERATION}.war.ab_every=null or {_GENERATION}.war.enabled=true",
        )


def _environments(config: RunConfig) -> Iterator[ConfigError]:
    if not any(entry for _, entry in config.env):
        names = list(type(config.env).model_fields)
        yield ConfigError(
            "env",
            config.env.model_dump(),
            f"allowed: at least one of {', '.join(names)}",
            f"add ++env.{names[0]}.weight=1",
        )


def _comparison(config: RunConfig) -> Iterator[ConfigError]:
    modes, steps = list(config.compare.modes), config.compare.steps
    if "baseline" not in modes or len(set(modes)) < len(modes):
        yield ConfigError(
            "compare.modes",
            modes,
            "allowed: baseline, which speed-ups are relative to, and others, each once",
            "set compare.modes=[baseline,war]",
        )
    if steps is not None and steps > config.grpo.max_num_steps:
        yield ConfigError(
            "compare.steps",
            steps,
            f"allowed: at most grpo.max_num_steps={config.grpo.max_num_steps}, the steps of the live run",
            "set compare.steps=null for all of them",
        )
