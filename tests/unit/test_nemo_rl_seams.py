"""Where WAR takes hold of NeMo-RL: names are bound anew wherever they are bound already, and once."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
from nemo_rl.distributed import ray_actor_environment_registry as registry
from nemo_rl.distributed import worker_groups
from nemo_rl.models.generation.vllm import vllm_generation
from nemo_rl.utils import checkpoint
from nemo_rl_world import PATCHED, undone

from nemo_war import launch
from nemo_war.config import WarConfig
from nemo_war.errors import ConfigError, UserError
from nemo_war.generation.nemo_rl import events, generation, gym, seams
from nemo_war.generation.nemo_rl.checkpoints import WarCheckpointManager
from nemo_war.generation.nemo_rl.generation import WarGeneration
from tests.double.behaviours import configuration

STOCK = WarGeneration.__base__
MODULES = [
    "nemo_rl.models.generation.vllm",
    "nemo_rl.models.generation.vllm.vllm_generation",
    "nemo_rl.algorithms.grpo",
    "nemo_rl.algorithms.ppo",
    "nemo_rl.algorithms.distillation",
    "nemo_rl.algorithms.single_controller_utils.setup",
    "nemo_rl.evals.eval",
]
VALIDATING = [
    ("nemo_rl.algorithms.grpo", "validate"),
    ("nemo_rl.algorithms.ppo", "validate"),
    ("nemo_rl.algorithms.distillation", "validate"),
    ("nemo_rl.algorithms.grpo_sync", "validate_sync"),
]


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PATCHED:
        importlib.import_module(name)
    undone(monkeypatch)


def resolve(default: str, **changes: object) -> str:
    return vllm_generation.resolve_generation_worker_cls(default, configuration(**changes))


@pytest.mark.parametrize("name", MODULES)
def test_an_algorithm_that_has_the_name_already_makes_ours(name: str) -> None:
    assert importlib.import_module(name).VllmGeneration is STOCK
    seams.install()
    assert importlib.import_module(name).VllmGeneration is WarGeneration


def test_one_that_is_imported_later_makes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    seams.install()
    monkeypatch.delitem(sys.modules, "nemo_rl.evals.eval")
    assert importlib.import_module("nemo_rl.evals.eval").VllmGeneration is WarGeneration


def test_modules_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("somebodys")
    other.VllmGeneration = STOCK
    monkeypatch.setitem(sys.modules, "somebodys", other)
    seams.install()
    assert other.VllmGeneration is STOCK


@pytest.mark.parametrize(("theirs", "ours"), seams.WORKERS.items())
def test_workers_are_ours_where_the_block_says_so_and_have_the_stock_interpreter(
    theirs: str, ours: str
) -> None:
    seams.install()
    assert resolve(theirs) == resolve(theirs, war={"enabled": False}) == theirs
    assert resolve(theirs, war={}) == ours
    assert registry.get_actor_python_env(ours) == registry.get_actor_python_env(theirs)
    module, _, name = ours.rpartition(".")
    assert hasattr(getattr(importlib.import_module(module), name), "remote")


def test_workers_that_are_not_known_stay_what_they_are() -> None:
    seams.install()
    assert resolve("of.another.kind", war={}) == "of.another.kind"
    with pytest.raises(ConfigError, match="quant_cfg"):
        resolve(next(iter(seams.WORKERS)), war={}, quant_cfg="NVFP4_DEFAULT_CFG")


def test_installing_twice_is_installing_once() -> None:
    seams.install()
    wrapped = vllm_generation.resolve_generation_worker_cls
    entries = dict(registry.ACTOR_ENVIRONMENT_REGISTRY)
    seams.install()
    assert vllm_generation.resolve_generation_worker_cls is wrapped
    assert entries == registry.ACTOR_ENVIRONMENT_REGISTRY
    assert vllm_generation.VllmGeneration is WarGeneration
    assert WarGeneration.__base__ is STOCK


@pytest.mark.parametrize(("module", "name"), VALIDATING)
def test_a_validation_teaches_nothing_and_is_otherwise_nemo_rls(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learning = []

    class Generation:
        def set_learning(self, on: bool) -> None:
            learning.append(on)

    made = Generation()
    monkeypatch.setattr(generation, "living", {made})
    home = importlib.import_module(module)
    monkeypatch.setattr(home, name, lambda *arguments, **options: (arguments, options, list(learning)))
    seams.install()
    seams.install()
    assert getattr(home, name)(1, step=2) == ((1,), {"step": 2}, [False])
    assert learning == [False, True]


def test_checkpoints_are_made_by_our_manager_and_in_processes_that_are_given_a_generation_too() -> None:
    algorithm = ModuleType("nemo_rl.algorithms.made_up")
    algorithm.CheckpointManager = checkpoint.CheckpointManager
    sys.modules[algorithm.__name__] = algorithm
    try:
        seams.follow()
        assert algorithm.CheckpointManager is WarCheckpointManager
    finally:
        del sys.modules[algorithm.__name__]


def test_our_workers_live_in_the_environments_of_stock_ones() -> None:
    stock = {name: worker_groups.create_local_venv_on_each_node("uv", name) for name in seams.WORKERS}
    seams.install()
    for theirs, ours in seams.WORKERS.items():
        assert worker_groups.create_local_venv_on_each_node("uv", ours) == stock[theirs]
    assert worker_groups.create_local_venv_on_each_node("uv", "of.another").endswith("of.another/bin/python")


@pytest.mark.parametrize("urls", [["http://a/v1", "http://b/v1"], []])
def test_the_gym_is_given_our_routers_url_once(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, asked = importlib.import_module("nemo_rl.algorithms.grpo"), []
    home = importlib.import_module("nemo_rl.environments.nemo_gym")
    stock = home.spinup_nemo_gym_actor
    monkeypatch.setattr(gym, "_fronts", {"http://ours/v1": None})
    policies: list[str] = []
    monkeypatch.setattr(gym, "_start", lambda policy, urls: policies.append(policy) or "http://ours/v1")

    def spinup(env_configs: Any, base_urls: Any, model_name: str) -> None:
        asked.append(base_urls)

    for module in (algorithm, home):
        assert module.spinup_nemo_gym_actor is stock
        monkeypatch.setattr(module, "spinup_nemo_gym_actor", spinup)
    seams.install(WarConfig(routing={"policy": "sticky"}))
    for base_urls in (urls, ["http://ours/v1"]):
        algorithm.spinup_nemo_gym_actor(env_configs={}, base_urls=base_urls, model_name="m")
    assert asked == [["http://ours/v1"] if urls else [], ["http://ours/v1"]]
    assert policies == ["sticky"] * bool(urls)


def test_our_events_go_where_a_jobs_logs_go(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Path] = []
    monkeypatch.setattr(events.log, "begin", begun.append)
    logger = importlib.import_module("nemo_rl.utils.logger")
    seams.install()
    assert logger.get_next_experiment_dir("logs") == "logs/exp_001"
    assert begun == [Path("logs/exp_001")]


def test_a_generation_travels_as_the_class_that_it_is() -> None:
    seams.install()
    made = WarGeneration.__new__(WarGeneration)
    made.cfg = configuration(war={})
    made._front, made.worker_group = None, NoWorkers()
    copy = pickle.loads(pickle.dumps(made))
    assert type(copy) is WarGeneration
    assert copy.cfg == made.cfg


class NoWorkers:
    def shutdown(self, cleanup_method: str) -> bool:
        return True


# --- the launcher ------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    """A script as NeMo-RL's are, that leaves word of what it found."""
    path, arguments, paths = tmp_path / "run.py", sys.argv, list(sys.path)
    (tmp_path / "beside.py").write_text("")
    path.write_text(
        "import sys, beside\n"
        "from pathlib import Path\n"
        "from nemo_rl.models.generation.vllm import VllmGeneration\n"
        "Path(__file__).with_suffix('.txt').write_text(f'{VllmGeneration.__name__} {sys.argv[1:]}')\n"
    )
    yield path
    sys.argv, sys.path[:] = arguments, paths


def launched(script: Path, war: str, *overrides: str) -> str:
    config = script.with_suffix(".yaml")
    config.write_text(f"policy: {{generation: {{backend: vllm{war}}}}}\n")
    assert launch.main([str(script), "--config", str(config), *overrides]) == 0
    return script.with_suffix(".txt").read_text().partition(" ")[0]


def test_a_script_that_is_launched_makes_ours_where_its_configuration_says_so(script: Path) -> None:
    assert launched(script, ", war: {enabled: true}") == "WarGeneration"
    assert script.with_suffix(".txt").read_text().endswith(f"['--config', '{script.with_suffix('.yaml')}']")


def test_what_the_command_line_says_counts_too(script: Path) -> None:
    assert launched(script, "", "++policy.generation.war.enabled=true") == "WarGeneration"


@pytest.mark.parametrize("war", ["", ", war: {enabled: false}"])
def test_a_script_without_war_finds_nemo_rl_as_it_is(script: Path, war: str) -> None:
    assert launched(script, war) == "VllmGeneration"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing.py"], "SCRIPT='missing.py'"),
        (["{script}"], "--config"),
        (["{script}", "--config", "{wrong}"], "policy.generation.war.speculativ"),
    ],
)
def test_a_mistake_is_one_line_and_the_script_is_not_run(
    script: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = script.with_suffix(".yaml")
    wrong.write_text("policy: {generation: {war: {speculativ: {}}}}\n")
    names = {"script": str(script), "wrong": str(wrong)}
    assert launch.main([each.format(**names) for each in arguments]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not script.with_suffix(".txt").exists()


def test_a_router_that_ray_starts_again_costs_no_step_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise ray.exceptions.RayError("it is being started")

    router = SimpleNamespace(take_learned=SimpleNamespace(remote=gone))
    monkeypatch.setattr(gym, "_fronts", {"http://ours/v1": router})
    assert gym.take_learned() == []


def test_a_replica_that_has_died_and_cannot_save_is_said_in_a_line(tmp_path: Path) -> None:
    def ask_all(method: str, *arguments: Any) -> None:
        raise ray.exceptions.RayActorError(error_msg="the actor died")

    made = WarGeneration.__new__(WarGeneration)
    made.fleet, made.cfg = SimpleNamespace(ask_all=ask_all), configuration(war={})  # type: ignore[assignment]
    made._front, made.worker_group = None, NoWorkers()
    with pytest.raises(UserError, match="did not save it"):
        made.save(tmp_path / "nemo_war")
