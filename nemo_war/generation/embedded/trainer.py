"""One GRPO update in torch on Hugging Face weights, for the embedded run.

The loss is GRPO's (arXiv 2402.03300) without a reference model: the clipped surrogate
of PPO (arXiv 1707.06347) with group-relative advantages, averaged over all generated
tokens of the batch as NeMo-RL's `token_level_loss` does. The ratio is taken against
the rollout's own logprobs, and each batch is used for one step.

Master weights and the optimiser's state are float32; the forward pass runs on a copy
in `precision`. A float32 forward takes three times as long, so bfloat16 is the default;
what it costs in agreement with the rollout is `logprob_error`, in every step's record.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from nemo_war.generation.embedded import tensors
from nemo_war.generation.embedded.advantages import advantages
from nemo_war.generation.embedded.policy_logprobs import Batch, Sample, batches, generated_logprobs

WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
"""Files of a trainer in a folder."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of each weight."""


@dataclass(frozen=True)
class TrainerConfig:
    """How an update is made.

    Attributes:
        lr: AdamW's learning rate.
        weight_decay: AdamW's decoupled decay, per step and unit of `lr`.
        betas: AdamW's decay of the first and the second moment.
        eps: AdamW's epsilon.
        max_grad_norm: the gradient is scaled down to this norm.
        micro_batch_size: sequences per forward pass; bounds memory.
        clip_low: ratios below 1 - `clip_low` earn no further gradient.
        clip_high: ratios above 1 + `clip_high` earn no further gradient.
        normalize_rewards: divide advantages by the deviation of their group.
        leave_one_out: a trajectory's own reward is no part of its baseline.
        temperature: of the rollouts; logits are divided by it here, too.
        precision: of the forward pass.
    """

    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    micro_batch_size: int = 2
    clip_low: float = 0.2
    clip_high: float = 0.2
    normalize_rewards: bool = True
    leave_one_out: bool = True
    temperature: float = 1.0
    precision: Literal["bfloat16", "float32"] = "bfloat16"


@dataclass(frozen=True)
class UpdateStats:
    """What one update did.

    Attributes:
        loss: the clipped surrogate, mean over the batch's generated tokens.
        grad_norm: norm of the gradient before it was scaled down.
        logprob_error: how far the rollout's logprobs are from the trainer's: the mean
            over generated tokens of exp(|rollout - trainer|), which is the factor by
            which two probabilities of a token differ. 1 is agreement. NeMo-RL's
            `token_mult_prob_error`.
        clipped_share: share of generated tokens whose ratio was clipped, so that they
            gave no gradient.
        groups: groups in the batch.
        skipped_groups: those without any advantage, as all siblings earned the same;
            they were measured but not trained on.
        stepped: whether the weights changed; False when every group was skipped.
        seconds: wall time.
    """

    loss: float
    grad_norm: float
    logprob_error: float
    clipped_share: float
    groups: int
    skipped_groups: int
    stepped: bool
    seconds: float


class Trainer:
    """The policy's weights and their optimiser.

    Works for causal language models whose logits are the output embedding of the last
    hidden state (Llama, Mistral, Qwen, SmolLM and the like). Not thread-safe.
    """

    def __init__(self, model_dir: str | Path, config: TrainerConfig) -> None:
        self._config = config
        logging.disable_progress_bar()  # two seconds need no bar between the run's own lines
        # Where this is not said, transformers asks on the terminal whether to run a folder's code.
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, trust_remote_code=False
        )
        # Recomputing each layer in the backward pass takes a quarter more time; keeping
        # what 30 layers computed on 1,800 tokens would take 1.7 GB more.
        self._model.activation_checkpointing_enable({"use_reentrant": False})
        self._model.train()
        # Tied weights are named once here, as they are in the model's file.
        self._masters: dict[str, torch.Tensor] = {}
        for name, weight in self._model.named_parameters():
            master = weight.detach().clone()
            self._masters[name] = master
            # Only the parameters: `model.to()` would also round the rotary frequencies.
            weight.data = master.to(getattr(torch, config.precision))
            weight.register_post_accumulate_grad_hook(partial(_add_to_master, master))
        self._optimizer = torch.optim.AdamW(
            self._masters.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def update(self, samples: Sequence[Sample]) -> UpdateStats:
        """Take one optimiser step on a batch of trajectories.

        Mutates the weights, unless no trajectory has an advantage: then nothing
        changes, the optimiser's moments included, and the stats say so.
        """
        started = time.perf_counter()
        config = self._config
        worth = advantages(
            [sample.reward for sample in samples],
            [sample.group for sample in samples],
            config.normalize_rewards,
            config.leave_one_out,
        )
        tokens = max(1, sum(sum(sample.generated) for sample in samples))
        trained = [at for at, sample in enumerate(samples) if worth[at] != 0.0 and any(sample.generated)]
        measured = sorted(set(range(len(samples))) - set(trained))
        sums = np.zeros(3)
        for batch in batches(samples, trained, config.micro_batch_size):
            sums += self._accumulate(batch, torch.from_numpy(worth), tokens)
        with torch.no_grad():
            for batch in batches(samples, measured, config.micro_batch_size):
                sums[1] += _error_sum(self._logprobs(batch), batch.rollout_logprobs)
        groups = {sample.group for sample in samples}
        active = {samples[at].group for at in trained}
        return UpdateStats(
            loss=float(sums[0]) / tokens,
            grad_norm=self._step() if trained else 0.0,
            logprob_error=float(sums[1]) / tokens,
            clipped_share=float(sums[2]) / tokens,
            groups=len(groups),
            skipped_groups=len(groups - active),
            stepped=bool(trained),
            seconds=time.perf_counter() - started,
        )

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Logprobs of the generated tokens under the present weights.

        Returns:
            For each sample an array as long as its tokens; 0 where not generated.
        """
        result = [np.zeros(len(sample.token_ids), dtype=np.float32) for sample in samples]
        for batch in batches(samples, range(len(samples)), self._config.micro_batch_size):
            values = self._logprobs(batch).numpy()
            for position in np.unique(batch.sample):
                mine = batch.sample.numpy() == position
                result[position][batch.column.numpy()[mine]] = values[mine]
        return result

    def state_bytes(self) -> bytes:
        """The weights as one safetensors file in bfloat16, named as in the model's file.

        A tied output embedding is left out, as it is there.
        """
        return safetensors.torch.save({name: master.bfloat16() for name, master in self._masters.items()})

    def save(self, folder: Path) -> None:
        """Write the master weights and the optimiser's moments into a folder that exists.

        That is all there is: an update draws nothing at random, and settings are the configuration's.

        Raises:
            OSError: a file could not be written.
        """
        moments = {
            f"{name}.{moment}": self._optimizer.state[master][moment]
            for name, master in self._masters.items()
            if master in self._optimizer.state  # a weight has none before its first update
            for moment in _MOMENTS
        }
        tensors.write(folder / WEIGHTS, self._masters)
        tensors.write(folder / OPTIMIZER, moments)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Go on with what `save` wrote, to the bit.

        Raises:
            UserError: a file is missing, or another model's; nothing was changed.
        """
        moments: dict[str, torch.Tensor] = {}
        for name, master in self._masters.items():
            like = {"step": torch.tensor(0.0), "exp_avg": master, "exp_avg_sq": master}
            moments |= {f"{name}.{moment}": like[moment] for moment in _MOMENTS}
        weights = tensors.read(folder / WEIGHTS, self._masters)
        found = tensors.read(folder / OPTIMIZER, moments, partial=True)  # see `save`
        self._optimizer.state.clear()
        for name, master in self._masters.items():
            master.copy_(weights[name])
            # Copies: what was read is the file's own memory.
            kept = {each: found[key].clone() for each in _MOMENTS if (key := f"{name}.{each}") in found}
            if len(kept) == len(_MOMENTS):
                self._optimizer.state[master] = kept
        self._forward_masters()

    def _logprobs(self, batch: Batch) -> torch.Tensor:
        return generated_logprobs(self._model, batch, self._config.temperature)

    def _accumulate(self, batch: Batch, worth: torch.Tensor, tokens: int) -> NDArray[np.float64]:
        """Add a micro batch's gradient to the masters; returns its sums of loss, error and clipped."""
        logprobs = self._logprobs(batch)
        losses, clipped = clipped_surrogate(
            logprobs,
            batch.rollout_logprobs,
            worth[batch.sample].float(),
            self._config.clip_low,
            self._config.clip_high,
        )
        # Divided by the tokens of the whole batch, so that its split does not matter.
        (losses.sum() / tokens).backward()
        error = _error_sum(logprobs.detach(), batch.rollout_logprobs)
        return np.array([losses.sum().item(), error, clipped.sum().item()])

    def _step(self) -> float:
        """Apply the gathered gradient; returns its norm."""
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), self._config.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._forward_masters()
        return float(norm)

    @torch.no_grad()
    def _forward_masters(self) -> None:
        """Let forward passes run on the masters as they are now."""
        for name, weight in self._model.named_parameters():
            weight.copy_(self._masters[name])


def clipped_surrogate(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    worth: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped objective as a loss, per token.

    Args:
        logprobs: under the present weights, shape (n,).
        rollout_logprobs: under the weights that sampled the tokens, shape (n,).
        worth: advantage of each token's trajectory, shape (n,).
        clip_low: see `TrainerConfig`.
        clip_high: see `TrainerConfig`.

    Returns:
        Losses, shape (n,), and whether the clip took the gradient away, shape (n,).
    """
    ratio = torch.exp(logprobs - rollout_logprobs)
    plain = -worth * ratio
    clipped = -worth * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(plain, clipped), clipped > plain


def _error_sum(logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> float:
    return float(torch.exp((logprobs - rollout_logprobs).abs()).sum())


def _add_to_master(master: torch.Tensor, weight: torch.Tensor) -> None:
    """Move a gradient to the float32 master: micro batches must not add up in bfloat16."""
    gradient, weight.grad = weight.grad, None
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad.add_(gradient)
