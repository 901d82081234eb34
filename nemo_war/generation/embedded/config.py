"""The configuration of an embedded run: NeMo-RL's shape, its key names, its meanings.

Only the keys that the embedded run obeys exist; any other is refused, so that nobody
believes to have set something. Sizes have no default: the recipe is the place to see
them. `nemo_war.generation.embedded.conflicts` checks what concerns several keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, FiniteFloat, model_validator
from typing_extensions import TypedDict

from nemo_war.config import AbsolutePath, StrictModel, WarConfig
from nemo_war.configuration import load, validate
from nemo_war.configuration.problems import raise_first
from nemo_war.generation.embedded.conflicts import conflicts
from nemo_war.generation.embedded.environments.calculator import CalculatorConfig
from nemo_war.generation.embedded.environments.file_edit import FileEditConfig
from nemo_war.generation.embedded.model import BUNDLED, resolve

Mode = Literal["baseline", "sticky", "war"]
Precision = Literal["bfloat16", "float32"]
Decay = Annotated[FiniteFloat, Field(ge=0, lt=1)]


def _local(name: str) -> str:
    """A first look, so that a hub's name is refused before anything starts; `model.resolve` looks closer."""
    if name != BUNDLED and not Path(name).expanduser().is_dir():
        raise ValueError("there is no such folder here, and no hub is contacted")
    return name


LocalModel = Annotated[
    str,
    AfterValidator(_local),
    Field(description=f"{BUNDLED}, which is bundled, or a local Hugging Face folder", examples=[BUNDLED]),
]


class GrpoConfig(StrictModel):
    """`grpo`: how many rollouts a step has, how many steps, and the advantages."""

    num_prompts_per_step: int = Field(ge=1, description="Groups of a step.")
    num_generations_per_prompt: int = Field(ge=1, description="Trajectories of a group.")
    max_rollout_turns: int = Field(ge=1, description="Assistant turns of a trajectory, at most.")
    max_num_steps: int = Field(ge=1, description="GRPO steps of the run.")
    normalize_rewards: bool = Field(True, description="Divide a group's advantages by their deviation.")
    use_leave_one_out_baseline: bool = Field(True, description="Compare with the siblings' mean.")
    seed: int = Field(0, ge=0, description="Of tasks, sampling and training.")
    val_period: int = Field(0, ge=0, description="Validate every this many steps; 0: never.")
    max_val_samples: int = Field(0, ge=0, description="Prompts of a validation.")


class LossConfig(StrictModel):
    """`loss_fn`: the clipped policy loss."""

    ratio_clip_min: FiniteFloat = Field(0.2, ge=0, lt=1, description="Clip the ratio below 1 - this.")
    ratio_clip_max: FiniteFloat = Field(0.2, ge=0, description="Clip the ratio above 1 + this.")
    reference_policy_kl_penalty: Literal[0] = Field(
        0, description="no penalty, as the embedded run keeps no reference model to compare with"
    )


class TokenizerConfig(StrictModel):
    """`policy.tokenizer`."""

    name: LocalModel


class OptimizerArguments(StrictModel):
    """`policy.optimizer.kwargs`."""

    lr: FiniteFloat = Field(ge=0, description="Learning rate; 0 keeps the weights.", examples=[2e-6])
    weight_decay: FiniteFloat = Field(0.01, ge=0)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: FiniteFloat = Field(1e-8, gt=0)


class OptimizerConfig(StrictModel):
    """`policy.optimizer`."""

    name: Literal["torch.optim.AdamW"] = "torch.optim.AdamW"
    kwargs: OptimizerArguments


class VllmConfig(StrictModel):
    """`policy.generation.vllm_cfg`: the engine arguments that NeMo-RL names itself."""

    async_engine: Literal[True] = Field(True, description="Turns need vLLM's AsyncLLM.")
    precision: Precision = Field("bfloat16", description="Of the engine's weights.")
    tensor_parallel_size: int = Field(1, ge=1, description="Processes that share one replica's weights.")
    pipeline_parallel_size: Literal[1] = Field(1, description="An embedded replica is one pipeline stage.")
    enforce_eager: bool = Field(True, description="False compiles the model: slower start, faster steps.")
    max_model_len: int = Field(ge=2, description="Longest sequence of the engine, prompt included.")


class VllmKwargs(TypedDict, total=False):
    """`policy.generation.vllm_kwargs`: passed on to vLLM's engine arguments as it stands."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    max_num_seqs: Annotated[int, Field(ge=1, description="Requests that run at a time, per replica.")]
    max_num_batched_tokens: Annotated[int, Field(ge=1, description="Tokens of one engine step, per replica.")]
    enable_prefix_caching: bool
    kv_cache_memory_bytes: Annotated[int, Field(ge=1, description="KV cache of one replica.")]


class GenerationConfig(StrictModel):
    """`policy.generation`."""

    backend: Literal["vllm"] = "vllm"
    temperature: FiniteFloat = Field(1.0, gt=0, description="greedy siblings would be all alike")
    top_p: Literal[1] = Field(1, description="The trainer recomputes logprobs of the whole distribution.")
    top_k: None = Field(None, description="As for top_p.")
    max_new_tokens: int = Field(ge=1, description="Tokens of one turn, at most.")
    stop_strings: list[str] | None = Field(None, description="End a turn, beside the environment's own.")
    stop_token_ids: list[int] | None = Field(None, description="End a turn, beside the model's own.")
    vllm_cfg: VllmConfig
    vllm_kwargs: VllmKwargs = Field(default_factory=VllmKwargs)
    war: WarConfig = WarConfig()

    def engine_arguments(self) -> dict[str, Any]:
        """vLLM's engine arguments, model aside, that stock and WAR replicas have in common."""
        named = self.vllm_cfg
        return {
            "dtype": named.precision,
            "tensor_parallel_size": named.tensor_parallel_size,
            "pipeline_parallel_size": named.pipeline_parallel_size,
            "enforce_eager": named.enforce_eager,
            "max_model_len": named.max_model_len,
            **self.vllm_kwargs,
        }


class PolicyConfig(StrictModel):
    """`policy`: the model, its training and its generation."""

    model_name: LocalModel
    tokenizer: TokenizerConfig
    precision: Precision = Field("bfloat16", description="Of the weights sent to the replicas.")
    max_total_sequence_length: int = Field(ge=2, description="Tokens of a trajectory; it is truncated there.")
    train_global_batch_size: int | None = Field(
        None, ge=1, description="Must be all of a step; null: so it is."
    )
    train_micro_batch_size: int = Field(ge=1, description="Trajectories per forward and backward pass.")
    max_grad_norm: FiniteFloat = Field(1.0, gt=0, description="Gradients are scaled down to this norm.")
    optimizer: OptimizerConfig
    generation: GenerationConfig

    def tokenizer_folder(self, model: Path) -> Path:
        """The tokenizer's folder, where `model` is the model's own."""
        if self.tokenizer.name == self.model_name:
            return model
        # Not `resolve` for every name: a folder with a tokenizer alone will do.
        return resolve(BUNDLED) if self.tokenizer.name == BUNDLED else Path(self.tokenizer.name).expanduser()


class DataConfig(StrictModel):
    """`data`: a fixed set of prompts, drawn again epoch after epoch."""

    num_prompts: int = Field(ge=1, description="Distinct training prompts.")


class FileEditEntry(StrictModel):
    """`env.file_edit`."""

    weight: FiniteFloat = Field(1.0, gt=0, description="Share of the prompts, relative to the others.")
    cfg: FileEditConfig = FileEditConfig()


class CalculatorEntry(StrictModel):
    """`env.calculator`."""

    weight: FiniteFloat = Field(1.0, gt=0, description="Share of the prompts, relative to the others.")
    cfg: CalculatorConfig = CalculatorConfig()


class EnvConfig(StrictModel):
    """`env`: the environments that are there are mixed by weight; null leaves one out."""

    file_edit: FileEditEntry | None = None
    calculator: CalculatorEntry | None = None


class LoggerConfig(StrictModel):
    """`logger`."""

    log_dir: Path = Field(Path("runs"), description="Each run makes a folder of its own below it.")
    tensorboard_enabled: Literal[False] = Field(False, description="A run writes JSONL and summary.json.")


class CheckpointingConfig(StrictModel):
    """`checkpointing`: what a run can be resumed from, which it is by itself."""

    enabled: bool = Field(False, description="Save checkpoints, and go on from the latest that is there.")
    checkpoint_dir: AbsolutePath = Field(
        Path("results/grpo"), validate_default=True, description="Folder of this run's checkpoints alone."
    )
    metric_name: None = Field(None, description="By age: the latest checkpoints are kept.")
    keep_top_k: int | None = Field(
        3, ge=1, description="Checkpoints that are kept, the latest; null keeps all."
    )
    save_period: int = Field(10, ge=1, description="Steps between two; the last step is always saved.")


class ClusterConfig(StrictModel):
    """`cluster`: what the run takes of this machine."""

    num_nodes: Literal[1] = Field(1, description="The embedded run stays on one machine.")
    gpus_per_node: Literal[0] = Field(0, description="The embedded run is the CPU default.")
    num_replicas: int = Field(ge=1, description="vLLM engines.")
    cpus_per_replica: int = Field(1, ge=1, description="Cores that each engine computes on.")


class CompareConfig(StrictModel):
    """`compare`: the fixed work of `--compare`."""

    repeats: int = Field(3, ge=1, description="Times each mode does the work; medians are reported.")
    steps: int | None = Field(None, ge=1, description="Steps of the live run to replay; null: all.")
    modes: tuple[Mode, ...] = Field(("baseline", "sticky", "war"), min_length=1, description="In this order.")


class RunConfig(StrictModel):
    """One embedded run."""

    grpo: GrpoConfig
    loss_fn: LossConfig = LossConfig()
    policy: PolicyConfig
    data: DataConfig
    env: EnvConfig
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    logger: LoggerConfig = LoggerConfig()
    cluster: ClusterConfig
    compare: CompareConfig = CompareConfig()

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Self:
        """Read a recipe, with `a.b=c` overrides.

        Raises:
            ConfigError: it is not a configuration of an embedded run.
        """
        return validate(load(path, overrides), cls)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        raise_first(conflicts(self))
        return self
