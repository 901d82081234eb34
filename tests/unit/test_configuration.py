"""Configurations: the examples load, and whatever is wrong is one line that helps."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from nemo_war.config import WarConfig
from nemo_war.configuration import load
from nemo_war.errors import ConfigError
from nemo_war.generation.embedded.config import RunConfig

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples/configs").glob("grpo_embedded*.yaml"))
EXEMPLAR = ROOT / "examples/configs/grpo_embedded_cpu.yaml"

ENGINE = "policy.generation.vllm_cfg"
EXTRA = "policy.generation.vllm_kwargs"
WAR = "policy.generation.war"
EXCHANGE = f"{WAR}.speculative.history.exchange"


@dataclass(frozen=True)
class Broken:
    """An example with overrides that break it, and what the message must say."""

    overrides: tuple[str, ...]
    key: str
    value: str
    allowed: str
    fix: str

    def __str__(self) -> str:
        return self.overrides[-1]


def broken(*overrides: str, key: str, value: str, allowed: str, fix: str) -> Broken:
    return Broken(overrides, key, value, allowed, fix)


BROKEN = [
    # How an override is written.
    broken("grpo.seed", key="grpo.seed", value="'grpo.seed'", allowed="KEY=VALUE", fix="grpo.seed=VALUE"),
    broken("grpo.seed=", key="grpo.seed", value="'grpo.seed='", allowed="KEY=VALUE", fix="grpo.seed=null"),
    broken("~grpo.seed", key="grpo.seed", value="'~grpo.seed'", allowed="no ~", fix="grpo.seed=null"),
    broken("+grpo.x=1", key="grpo.x", value="'+grpo.x=1'", allowed="++KEY=VALUE", fix="++grpo.x=1"),
    broken("grpo..seed=1", key="grpo..seed", value="'grpo..seed=1'", allowed="dotted KEY", fix="grpo.seed=1"),
    broken("grpo.seed=[1", key="grpo.seed", value="'[1'", allowed="a YAML value", fix="write grpo.seed="),
    broken("grpo.num_prompt_per_step=3", key="grpo.num_prompt_per_step", value="3",
           allowed="num_prompts_per_step, num_generations_per_prompt",
           fix="did you mean grpo.num_prompts_per_step?"),
    broken("compare.modes[0]=war", key="compare.modes[0]", value="compare.modes[0]=war",
           allowed="replaced whole", fix="compare.modes=["),
    broken("compare.modes.0=war", key="compare.modes.0", value="'war'", allowed="whole list",
           fix="compare.modes=["),
    broken("++grpo.seed.x=1", key="grpo.seed.x", value="1", allowed="grpo.seed is the value 42",
           fix="grpo.seed="),
    # Interpolation.
    broken("grpo.seed=${grpo.sed}", key="grpo.seed", value="'${grpo.sed}'", allowed="'grpo.sed' not found",
           fix="${grpo.seed}"),
    broken("grpo.seed=${mul:a,b}", key="grpo.seed", value="'${mul:a,b}'", allowed="add|mul|div|max",
           fix="correct"),
    broken("grpo.seed=${power:2,3}", key="grpo.seed", value="power", allowed="add|mul|div|max",
           fix="correct"),
    broken("grpo.seed=???", key="grpo.seed", value="'???'", allowed="a value in place of ???",
           fix="grpo.seed=VALUE"),
    # One value.
    broken("++grpo.num_prompt_per_step=3", key="grpo.num_prompt_per_step", value="3",
           allowed="num_prompts_per_step", fix="did you mean grpo.num_prompts_per_step?"),
    broken(f"++{WAR}.speculation=1", key=f"{WAR}.speculation", value="1",
           allowed="speculative, routing, refit", fix=f"did you mean {WAR}.speculative?"),
    broken("grpo.max_num_steps=0", key="grpo.max_num_steps", value="0", allowed="an integer, at least 1",
           fix="set grpo.max_num_steps=1"),
    broken("grpo.seed=true", key="grpo.seed", value="True", allowed="an integer", fix="set grpo.seed=0"),
    broken("grpo.seed='3'", key="grpo.seed", value="'3'", allowed="an integer", fix="set grpo.seed=0"),
    broken("policy.generation.temperature=0", key="policy.generation.temperature", value="0",
           allowed="above 0", fix="temperature=1.0"),
    broken("policy.generation.top_p=.nan", key="policy.generation.top_p", value="nan", allowed="allowed: 1",
           fix="top_p=1"),
    broken("policy.precision=bf16", key="policy.precision", value="'bf16'", allowed="bfloat16 or float32",
           fix="policy.precision=bfloat16"),
    broken("policy.model_name=Qwen/Qwen2.5-1.5B", key="policy.model_name", value="'Qwen/Qwen2.5-1.5B'",
           allowed="no hub is contacted", fix="policy.model_name=smollm2-135m-instruct"),
    broken("loss_fn.reference_policy_kl_penalty=0.01", key="loss_fn.reference_policy_kl_penalty",
           value="0.01", allowed="keeps no reference model", fix="loss_fn.reference_policy_kl_penalty=0"),
    broken("policy.optimizer.kwargs.betas=[0.9]", key="policy.optimizer.kwargs.betas[1]", value="<missing>",
           allowed="a number, at least 0, below 1", fix="add"),
    broken("policy.optimizer=null", key="policy.optimizer", value="None", allowed="a block of name, kwargs",
           fix="correct policy.optimizer"),
    broken("policy.generation.backend=sglang", key="policy.generation.backend", value="'sglang'",
           allowed="vllm", fix="policy.generation.backend=vllm"),
    broken(f"{ENGINE}.async_engine=false", key=f"{ENGINE}.async_engine", value="False", allowed="true",
           fix=f"{ENGINE}.async_engine=true"),
    broken(f"{EXTRA}.max_num_seqs=many", key=f"{EXTRA}.max_num_seqs", value="'many'",
           allowed="an integer, at least 1", fix=f"{EXTRA}.max_num_seqs=1"),
    broken("cluster.gpus_per_node=8", key="cluster.gpus_per_node", value="8", allowed="0",
           fix="cluster.gpus_per_node=0"),
    broken("compare.modes=[baseline,fast]", key="compare.modes[1]", value="'fast'",
           allowed="baseline or sticky or war", fix="write baseline there"),
    # Several values.
    broken("grpo.num_generations_per_prompt=1", key="grpo.num_generations_per_prompt", value="1",
           allowed="at least 2", fix="grpo.use_leave_one_out_baseline=false"),
    broken("grpo.max_val_samples=0", "grpo.val_period=2", key="grpo.max_val_samples", value="0",
           allowed="at least 1 with grpo.val_period=2", fix="grpo.val_period=0"),
    broken("policy.train_global_batch_size=6", key="policy.train_global_batch_size", value="6", allowed="12",
           fix="policy.train_global_batch_size=12"),
    broken("data.num_prompts=7", key="data.num_prompts", value="7",
           allowed="multiple of grpo.num_prompts_per_step=3", fix="data.num_prompts=9"),
    broken("policy.generation.max_new_tokens=1500", key="policy.generation.max_new_tokens", value="1500",
           allowed="policy.max_total_sequence_length=1536", fix="policy.generation.max_new_tokens=1472"),
    broken(f"{ENGINE}.max_model_len=1024", key="policy.max_total_sequence_length", value="1536",
           allowed=f"{ENGINE}.max_model_len=1024", fix=f"{ENGINE}.max_model_len=1536"),
    broken(f"++{EXTRA}.speculative_config.method=ngram", key=f"{EXTRA}.speculative_config",
           value="{'method': 'ngram'}", allowed=f"{WAR}.speculative decides", fix=f"set {WAR}.speculative"),
    broken(f"++{EXTRA}.worker_extension_cls=my.Extension", key=f"{EXTRA}.worker_extension_cls",
           value="'my.Extension'", allowed="WAR's own worker extension",
           fix=f"remove {EXTRA}.worker_extension_cls"),
    broken(f"++{EXTRA}.async_scheduling=true", key=f"{EXTRA}.async_scheduling", value="True",
           allowed="only without speculation", fix=f"{WAR}.speculative.enabled=false"),
    broken(f"++{EXTRA}.logits_processors=[a.B]", key=f"{EXTRA}.logits_processors", value="['a.B']",
           allowed="only without speculation", fix=f"{WAR}.speculative.enabled=false"),
    broken(f"{WAR}.speculative.history.max_group_share=1.5", key=f"{WAR}.speculative.history.max_group_share",
           value="1.5", allowed="at most 1", fix=f"{WAR}.speculative.history.max_group_share"),
    broken(f"{EXCHANGE}.when=always", key=f"{EXCHANGE}.when", value="'always'",
           allowed="step or live or off", fix=f"{EXCHANGE}.when=step"),
    broken("++policy.generation.min_p=0.1", key="policy.generation.min_p", value="0.1",
           allowed="temperature", fix="remove"),
    broken(f"{WAR}.enabled=false", f"{WAR}.ab_every=2", key=f"{WAR}.ab_every", value="2", allowed="null",
           fix=f"{WAR}.enabled=true"),
    broken("env.file_edit=null", "env.calculator=null", key="env",
           value="{'file_edit': None, 'calculator': None}", allowed="at least one of file_edit, calculator",
           fix="env.file_edit"),
    broken("env.file_edit.cfg.changes=8", key="env.file_edit.cfg", value="'changes': 8",
           allowed="below lines_min (6)", fix="correct env.file_edit.cfg"),
    broken("compare.modes=[war]", key="compare.modes", value="['war']", allowed="baseline",
           fix="compare.modes=["),
    # Checkpoints: what of NeMo-RL's block makes no sense here is refused, not ignored.
    broken("++checkpointing.higher_is_better=true", key="checkpointing.higher_is_better", value="True",
           allowed="enabled, checkpoint_dir, metric_name, keep_top_k, save_period",
           fix="remove checkpointing.higher_is_better"),
    broken("++checkpointing.save_optimizer=false", key="checkpointing.save_optimizer", value="False",
           allowed="unknown key", fix="checkpointing.save_optimizer"),
    broken("checkpointing.metric_name=val:accuracy", key="checkpointing.metric_name",
           value="'val:accuracy'", allowed="null (by age", fix="correct checkpointing.metric_name"),
    broken("checkpointing.save_period=0", key="checkpointing.save_period", value="0",
           allowed="an integer, at least 1", fix="set checkpointing.save_period="),
    broken("checkpointing.keep_top_k=0", key="checkpointing.keep_top_k", value="0",
           allowed="at least 1", fix="set checkpointing.keep_top_k="),
    broken("compare.steps=9", key="compare.steps", value="9", allowed="grpo.max_num_steps=3",
           fix="compare.steps=null"),
]  # fmt: skip


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_a_broken_override_is_one_line_with_key_value_allowed_and_fix(case: Broken):
    with pytest.raises(ConfigError) as caught:
        RunConfig.load(EXEMPLAR, case.overrides)
    error = caught.value
    assert error.key == case.key
    assert str(error).startswith(f"{case.key}=")
    assert case.value in str(error).split(": ", 1)[0] + repr(error.value)
    assert case.allowed in error.allowed
    assert case.fix in error.fix
    assert "\n" not in str(error)


def test_several_failures_are_counted_behind_the_first():
    with pytest.raises(ConfigError, match=r"^grpo\.sede=1: .* \(and 2 more\)$") as caught:
        RunConfig.load(EXEMPLAR, ["++grpo.sede=1", "grpo.max_num_steps=0", "cluster.num_replicas=none"])
    assert "grpo.seed" in caught.value.fix


def test_several_wrong_overrides_are_counted_too():
    with pytest.raises(ConfigError, match=r"^grpo\.a=1: .* \(and 1 more\)$"):
        RunConfig.load(EXEMPLAR, ["grpo.a=1", "grpo.seed"])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_loads(path: Path):
    RunConfig.load(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_says_how_to_use_it(path: Path):
    usage = f"# Usage: nemo-war run {path.relative_to(ROOT)}"
    assert path.read_text().startswith(usage)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_key_of_an_example_has_a_comment(path: Path):
    bare = [line for line in path.read_text().splitlines() if ": " in f"{line} " and "# " not in line]
    assert bare == []


def test_the_exemplar_shows_every_key_that_exists():
    shown = load(EXEMPLAR)
    known = RunConfig.load(EXEMPLAR).model_dump(mode="json")
    assert list(_paths(shown)) == list(_paths(known))


def test_the_exemplar_shows_the_defaults_of_war_but_for_the_prior_of_a_cpu():
    shown = RunConfig.load(EXEMPLAR).policy.generation.war.model_dump()
    defaults = WarConfig().model_dump()
    assert shown["speculative"].pop("step_time_prior") != defaults["speculative"].pop("step_time_prior")
    assert shown == defaults


def test_a_checked_configuration_can_be_written_and_read_again(tmp_path: Path):
    config = RunConfig.load(EXEMPLAR, ["grpo.seed=7", f"++{EXTRA}.block_size=32"])
    copy = tmp_path / "copy.yaml"
    copy.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert RunConfig.load(copy) == config


def test_a_bare_off_which_yaml_takes_for_false_switches_the_exchange_off():
    config = RunConfig.load(EXEMPLAR, [f"{EXCHANGE}.when=off"])
    assert config.policy.generation.war.speculative.history.exchange.when == "off"


def test_engine_arguments_hold_what_vllm_calls_them_and_whatever_was_added():
    config = RunConfig.load(EXEMPLAR, [f"++{EXTRA}.block_size=32"])
    arguments = config.policy.generation.engine_arguments()
    assert arguments["dtype"] == "bfloat16"
    assert arguments["max_model_len"] == 1536
    assert arguments["block_size"] == 32


def test_the_tokenizer_may_come_from_another_folder(tmp_path: Path):
    model = tmp_path / "model"
    assert RunConfig.load(EXEMPLAR).policy.tokenizer_folder(model) == model
    other = RunConfig.load(EXEMPLAR, [f"policy.tokenizer.name={tmp_path}"])
    assert other.policy.tokenizer_folder(model) == tmp_path


def test_the_configuration_needs_neither_torch_nor_ray_nor_vllm():
    code = (
        "import sys\n"
        "import nemo_war.config, nemo_war.cli, nemo_war.generation.embedded.config\n"
        "print(*sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == ""


def _paths(node: object, prefix: str = ""):
    if isinstance(node, dict):
        for name, child in sorted(node.items()):
            yield f"{prefix}{name}"
            yield from _paths(child, f"{prefix}{name}.")
