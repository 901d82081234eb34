"""Where WAR takes hold of NeMo-RL: names that its modules look up at run time, and a registry.

A name is replaced in the module that has it and in every module that has imported it, so that
it does not matter which were imported before. Actors unpickle classes by reference: what
travels is a subclass, which brings its own module along.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

from nemo_rl.distributed import ray_actor_environment_registry as registry
from nemo_rl.models.generation.vllm import vllm_generation
from nemo_rl.utils.checkpoint import CheckpointManager

from nemo_war.config import WarConfig
from nemo_war.generation.nemo_rl import events, generation, gym
from nemo_war.generation.nemo_rl.block import war_of
from nemo_war.generation.nemo_rl.checkpoints import WarCheckpointManager
from nemo_war.generation.nemo_rl.generation import WarGeneration

_STOCK = "nemo_rl.models.generation.vllm"
_OURS = "nemo_war.generation.nemo_rl.worker"
WORKERS = {
    f"{_STOCK}.vllm_worker_async.VllmAsyncGenerationWorker": f"{_OURS}.WarAsyncWorker",
    f"{_STOCK}.vllm_worker.VllmGenerationWorker": f"{_OURS}.WarSyncWorker",
}
"""Our worker classes by NeMo-RL's."""

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def install(war: WarConfig | None = None) -> None:
    """Have NeMo-RL make a `WarGeneration` wherever it makes a `VllmGeneration`; may be called twice.

    To be called in the driver, before or after the algorithms were imported. In other processes
    `follow` is enough.

    Args:
        war: of the job; of it matters what NeMo-RL does not pass on to where it is needed.
    """
    policy = (war or WarConfig()).routing.policy
    for name in ("grpo", "grpo_sync", "ppo", "distillation"):
        _wrap(f"nemo_rl.algorithms.{name}", ("validate", "validate_sync"), _validating)
    _wrap("nemo_rl.environments.nemo_gym", ("spinup_nemo_gym_actor",), partial(gym.routed, policy))
    _wrap(
        "nemo_rl.algorithms.single_controller_utils.setup",
        ("_maybe_start_generation_router",),
        partial(gym.ours, policy),
    )
    _wrap("nemo_rl.utils.logger", ("get_next_experiment_dir",), events.noting)
    _wrap(vllm_generation.__name__, ("resolve_generation_worker_cls",), _resolving)
    _wrap("nemo_rl.utils.venvs", ("create_local_venv_on_each_node",), _sharing_venvs)
    for theirs, ours in WORKERS.items():  # what our workers need is what theirs need
        registry.ACTOR_ENVIRONMENT_REGISTRY[ours] = registry.get_actor_python_env(theirs)
    _replace("VllmGeneration", WarGeneration.__base__, WarGeneration)
    follow()


def follow() -> None:
    """What a process needs that was given a generation: the one that saves checkpoints may be no driver."""
    _replace("CheckpointManager", CheckpointManager, WarCheckpointManager)


def _replace(name: str, theirs: Any, ours: Any) -> None:
    """Whatever module of NeMo-RL's knows it by this name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("nemo_rl") and getattr(module, name, None) is theirs:
            setattr(module, name, ours)


def _wrap(module: str, names: Sequence[str], wrap: Wrap) -> None:
    """Wrap those functions that the module has, for all who have imported them; no effect the second time."""
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError:  # an installation without what that algorithm or environment needs
        return
    for name in names:
        stock = getattr(home, name, None)
        if stock is not None and not hasattr(stock, "nemo_war"):
            wrapped = wraps(stock)(wrap(stock))
            wrapped.nemo_war = True  # type: ignore[attr-defined]
            _replace(name, stock, wrapped)


def _resolving(resolve: Callable[..., str]) -> Callable[..., str]:
    def resolve_generation_worker_cls(default_cls: str, config: Mapping[str, Any]) -> str:
        chosen = resolve(default_cls, config)
        return WORKERS.get(chosen, chosen) if war_of(config).enabled else chosen

    return resolve_generation_worker_cls


def _sharing_venvs(create: Callable[..., str]) -> Callable[..., str]:
    """NeMo-RL makes an environment for each class of actors; ours live in those that it has for its own.

    A container comes with those, and a node without a network could make no other.
    """
    theirs = {ours: stock for stock, ours in WORKERS.items()}

    def create_local_venv_on_each_node(py_executable: str, venv_name: str) -> str:
        return create(py_executable, theirs.get(venv_name, venv_name))

    return create_local_venv_on_each_node


def _validating(validate: Callable[..., Any]) -> Callable[..., Any]:
    def without_learning(*arguments: Any, **options: Any) -> Any:
        with generation.validating():
            return validate(*arguments, **options)

    return without_learning
