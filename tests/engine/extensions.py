"""A worker extension with what only tests may ask for."""

from __future__ import annotations

from nemo_war.generation.extension import WarExtension


class TestExtension(WarExtension):
    """Can put vLLM's own, broken function back in place."""

    __test__ = False

    def war_test_break_expansion(self, broken: bool) -> None:
        from vllm.v1.sample import rejection_sampler

        from nemo_war import compat

        ours = compat.expand_batch_to_tokens
        rejection_sampler.expand_batch_to_tokens = ours.replaces if broken else ours  # type: ignore[attr-defined]


class NotOurs:
    """A proposer that is not WAR's."""

    def __init__(self, vllm_config: object) -> None: ...

    def load_model(self, *args: object, **kwargs: object) -> None: ...

    def propose(self, sampled_token_ids: list[list[int]], *args: object, **kwargs: object) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]
