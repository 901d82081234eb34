"""A worker extension with what only tests may ask for."""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path
from typing import Any

import numpy as np

from nemo_war.generation.extension import WarExtension


class TestExtension(WarExtension):
    """Can put vLLM's own, broken function back in place."""

    __test__ = False

    def war_test_break_expansion(self, broken: bool) -> None:
        from vllm.v1.sample import rejection_sampler

        from nemo_war import compat

        ours = compat.expand_batch_to_tokens
        rejection_sampler.expand_batch_to_tokens = ours.replaces if broken else ours  # type: ignore[attr-defined]

    def war_test_mute_critical(self) -> None:
        """Draft nothing for critical turns, so that plain rows stand among speculating ones."""
        pricer = self.model_runner.drafter.pricer
        choose = pricer.choose
        pricer.choose = lambda load, survival, lengths, critical: np.where(
            critical, 0, choose(load, survival, lengths, critical)
        )

    def war_test_watch(self) -> None:
        """Count from now on how many requests the scheduler resumes after a preemption."""
        execute = self.model_runner.execute_model
        self.resumed = 0

        def watch(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self.resumed += len(scheduled.scheduled_cached_reqs.resumed_req_ids)
            return execute(scheduled, *args, **kwargs)

        self.model_runner.execute_model = watch

    def war_test_returns(self) -> int:
        """Requests that came back since `war_test_watch`."""
        return self.resumed

    def war_test_check(self) -> dict[str, int]:
        """Check the history, and say how much memory the process has."""
        drafter = self.model_runner.drafter
        drafter.history.check_integrity()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(
            0
        )  # what was freed is no growth, though the process still holds it
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {"resident": pages * resource.getpagesize(), "live": len(drafter._live)}


class NotOurs:
    """A proposer that is not WAR's."""

    def __init__(self, vllm_config: object) -> None: ...

    def load_model(self, *args: object, **kwargs: object) -> None: ...

    def propose(self, sampled_token_ids: list[list[int]], *args: object, **kwargs: object) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]
