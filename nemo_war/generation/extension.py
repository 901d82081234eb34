"""What the driver can ask of a vLLM worker: `worker_extension_cls`, called by `collective_rpc`.

vLLM mixes these classes into its worker, so the methods' `self` is the worker. Names
start with `war_`, as vLLM refuses a name it already has.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_war.errors import UserError


class RefitExtension:
    """Weights and facts of the process; used by stock replicas too, as NeMo-RL's own extension is."""

    model_runner: Any
    vllm_config: Any

    def war_process(self) -> dict[str, Any]:
        """Facts that only this process knows."""
        maps = Path("/proc/self/maps").read_text()
        kv_blocks = self.model_runner.kv_cache_config.num_blocks
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "libiomp": "libiomp5" in maps,
            "kv_tokens": kv_blocks * self.vllm_config.cache_config.block_size,
        }

    def war_load_weights(self, path: str) -> dict[str, Any]:
        """Load a safetensors file and say which bytes these were.

        Re-runs vLLM's weight post-processing, as CPU linear layers keep repacked copies.

        Args:
            path: the file, or a `/proc/PID/fd/N` name of one in memory.
        """
        from safetensors import safe_open
        from vllm.config import set_current_vllm_config

        from nemo_war.compat import refresh_tied_head

        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()
        with safe_open(path, framework="pt") as weights, set_current_vllm_config(self.vllm_config):
            names = list(weights.keys())
            self.model_runner.reload_weights(
                weights_iterator=((name, weights.get_tensor(name)) for name in names),
                is_checkpoint_format=True,
            )
        refresh_tied_head(self.model_runner.get_model())
        return {"digest": digest, "tensors": len(names)}


class WarExtension(RefitExtension):
    """The drafter's side of the worker."""

    def war_attach(self) -> dict[str, Any]:
        """Give the proposer its model runner, and prove that it is ours.

        Raises:
            RuntimeError: the engine runs with another drafter, or with none.
        """
        from nemo_war.speculative.proposer import SuffixProposer

        drafter = getattr(self.model_runner, "drafter", None)
        if not isinstance(drafter, SuffixProposer):
            raise RuntimeError(
                f"WAR's proposer is not active in this engine: its drafter is {type(drafter).__name__}"
            )
        drafter.attach(self.model_runner)
        return self.war_process() | {"attached": True, "workarounds": list(drafter.workarounds)}

    def war_statistics(self) -> dict[str, Any]:
        """Counters since the start."""
        return self.model_runner.drafter.statistics()

    def war_enable_drafting(self, enabled: bool) -> None:
        """Switch drafting on or off; the history keeps learning."""
        self.model_runner.drafter.enabled = enabled

    def war_advance_epoch(self, epoch: int) -> None:
        """A refit completed."""
        self.model_runner.drafter.advance_epoch(epoch)

    def war_commit(self, lengths: dict[str, int]) -> None:
        """Final lengths of trajectories, in tokens."""
        self.model_runner.drafter.commit(lengths)

    def war_save_history(self, path: str) -> None:
        """Write the history to a file; only the rank that drafts has one."""
        self.model_runner.drafter.save(path)

    def war_restore_history(self, path: str, empty_if_damaged: bool) -> int:
        """Learn from the history of an earlier run; return how many trajectories it had."""
        return self.model_runner.drafter.restore(path, empty_if_damaged)

    def war_save_state(self, stem: str) -> str | None:
        """Write all that the drafter learned into files of this stem; only the rank that drafts has any.

        Returns:
            Why they could not be written: of an exception vLLM would pass on no more than its text.
        """
        return _reason(self.model_runner.drafter.save_learned, stem)

    def war_restore_state(self, stem: str) -> str | None:
        """Go on with what `war_save_state` wrote; return why that is not possible."""
        return _reason(self.model_runner.drafter.restore_learned, stem)

    def war_export_history(self, path: str, lengths: dict[str, int] | None) -> int:
        """Write trajectories, cut to these lengths, to a `/proc/PID/fd/N`; return how many there were."""
        return self.model_runner.drafter.export_history(path, lengths)

    def war_import_history(self, path: str) -> int:
        """Learn what another replica wrote; return how many trajectories were news."""
        return self.model_runner.drafter.import_history(path)

    def war_reliability(self) -> list[tuple[float, float, int]]:
        """(mean prediction, observed acceptance, draft tokens) by decile of the prediction."""
        return self.model_runner.drafter.history.reliability()

    def war_clear_history(self) -> None:
        """Start from an empty history."""
        self.model_runner.drafter.clear_history()


def _reason(act: Callable[[str], None], stem: str) -> str | None:
    """Why acting on files failed, where that is for the user to mend."""
    try:
        act(stem)
    except (OSError, UserError) as error:
        return str(error)
    return None
