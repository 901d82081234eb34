from __future__ import annotations

import importlib
from typing import Any

from nemo_rl.distributed.ray_actor_environment_registry import get_actor_python_env
from nemo_rl.utils.venvs import create_local_venv_on_each_node

from tests.double.workers import Group


class RayWorkerBuilder:
    def __init__(self, ray_actor_class_fqn: str, *args: Any, **kwargs: Any) -> None:
        self.ray_actor_class_fqn = ray_actor_class_fqn
        self.args, self.kwargs = args, kwargs

    def make(self, bundle_indices: tuple[int, list[int]] | None) -> Any:
        module, _, name = self.ray_actor_class_fqn.rpartition(".")
        actor_class = getattr(importlib.import_module(module), name)
        _, _, more, _ = actor_class.configure_worker(1, bundle_indices)
        return actor_class.__ray_metadata__.modified_class(*self.args, **self.kwargs, **more)


class RayWorkerGroup(Group):
    def __init__(
        self,
        cluster: Any,
        remote_worker_builder: RayWorkerBuilder,
        bundle_indices_list: list[tuple[int, list[int]]],
    ) -> None:
        name = remote_worker_builder.ray_actor_class_fqn
        self.interpreter = create_local_venv_on_each_node(get_actor_python_env(name), name)
        actors = []
        for node, bundles in bundle_indices_list:
            actors.append(remote_worker_builder.make((node, bundles)))
            actors += [remote_worker_builder.make(None) for _ in bundles[1:]]
        super().__init__(actors, tied=len(bundle_indices_list[0][1]))
