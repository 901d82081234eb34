"""Which Python NeMo-RL runs its vLLM workers with, and ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_STOCK = "nemo_rl.models.generation.vllm"
ASYNCHRONOUS = f"{_STOCK}.vllm_worker_async.VllmAsyncGenerationWorker"
SYNCHRONOUS = f"{_STOCK}.vllm_worker.VllmGenerationWorker"
"""NeMo-RL's worker classes, each of which has an environment; ours live in the same."""


class Interpreter(NamedTuple):
    """A Python.

    Attributes:
        path: where it is, or will be.
        made_at_start: NeMo-RL makes the environment when a job first needs it.
    """

    path: Path
    made_at_start: bool

    @property
    def exists(self) -> bool:
        """Whether it can be asked now."""
        return self.path.is_file()


def interpreter(registered: str, worker: str, environment: Mapping[str, str], venvs: str) -> Interpreter:
    """The Python of a class of workers, by NeMo-RL's rules.

    Args:
        registered: what NeMo-RL's registry has for the class: a Python, or a command of uv's.
        worker: the class.
        environment: this process's variables.
        venvs: NeMo-RL's folder of environments where none is named.
    """
    if not registered.startswith("uv"):
        return Interpreter(Path(registered), made_at_start=False)
    folder = Path(os.path.normpath(environment.get("NEMO_RL_VENV_DIR", venvs)))
    return Interpreter(folder / worker / "bin" / "python", made_at_start=True)


def of_nemo_rl(worker: str) -> Interpreter:
    """The Python that the NeMo-RL of this process would take."""
    from nemo_rl.distributed.ray_actor_environment_registry import get_actor_python_env
    from nemo_rl.utils.venvs import DEFAULT_VENV_DIR

    return interpreter(get_actor_python_env(worker), worker, os.environ, DEFAULT_VENV_DIR)
