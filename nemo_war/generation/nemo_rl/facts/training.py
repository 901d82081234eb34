"""What is relied on in scripts, algorithms and the gym."""

from __future__ import annotations

from nemo_war.generation.nemo_rl.facts.fact import Fact, Kind

_ALGORITHMS = "nemo_rl.algorithms"
_CONTROLLER = f"{_ALGORITHMS}.single_controller_utils"
_CONFIG = "nemo_rl.utils.config"
_CHECKPOINTS = "nemo_rl.utils.checkpoint:CheckpointManager"
_GYM = "nemo_rl.environments.nemo_gym"
_ROUTER = "nemo_rl.models.generation.generation_router:GenerationRouterImpl"
_ROUTER_CONFIG = f"{_CONTROLLER}.config:GenerationRouterConfig"
_VALIDATING = (
    "policy_generation",
    "val_dataloader",
    "tokenizer",
    "val_task_to_env",
    "step",
    "master_config",
    "logger",
)
_SPINNING_UP = ("env_configs", "base_urls", "model_name")

FACTS = (
    # --- scripts and their configuration -------------------------------------------------
    Fact(
        f"{_CONFIG}:load_config",
        Kind.FUNCTION,
        "reads a YAML file and those that it names under `defaults`",
        "our block is looked at before the script runs",
        ("config_path",),
    ),
    Fact(
        f"{_CONFIG}:parse_hydra_overrides",
        Kind.FUNCTION,
        "applies a command line's overrides; a key that no file has needs `++`",
        "our block may come from there",
        ("cfg", "overrides"),
    ),
    Fact(
        f"{_CONFIG}:OverridesError",
        Kind.CLASS,
        "is raised by it, with a text of Hydra's that names the key",
        "an override that cannot be applied is one line",
    ),
    Fact(
        f"{_CONFIG}:register_omegaconf_resolvers",
        Kind.FUNCTION,
        "makes the resolvers known that its files use, and may be called again by the script",
        "our look at the file is not the last",
    ),
    Fact(
        "nemo_rl.utils.logger:get_next_experiment_dir",
        Kind.FUNCTION,
        "is the folder of a job's logs, which scripts ask for once",
        "our event log goes there",
        ("base_log_dir",),
    ),
    Fact(
        f"{_ALGORITHMS}.grpo:MasterConfig",
        Kind.CLASS,
        "keeps keys that it does not know, in blocks of any depth",
        "`policy.generation.war` gets to the generation, unchecked",
    ),
    *(
        Fact(
            f"{module}:VllmGeneration",
            Kind.CLASS,
            "is looked up by its bare name in this module when a generation is made",
            "the name is bound to our class where it was imported before",
        )
        for module in (
            f"{_ALGORITHMS}.grpo",
            f"{_ALGORITHMS}.ppo",
            f"{_ALGORITHMS}.distillation",
            f"{_CONTROLLER}.setup",
            "nemo_rl.evals.eval",
        )
    ),
    # --- validation ----------------------------------------------------------------------
    Fact(
        f"{_ALGORITHMS}.grpo:validate",
        Kind.FUNCTION,
        "does all generation of a validation, and is looked up by its bare name in this module",
        "what is generated there must not enter the history",
        (*_VALIDATING, "processor"),
        overridden=True,
    ),
    *(
        Fact(
            f"{_ALGORITHMS}.{algorithm}:validate",
            Kind.FUNCTION,
            "is this algorithm's, likewise",
            "what is generated there must not enter the history",
            _VALIDATING,
            overridden=True,
        )
        for algorithm in ("ppo", "distillation")
    ),
    Fact(
        f"{_ALGORITHMS}.grpo_sync:validate_sync",
        Kind.FUNCTION,
        "is that of GRPO with a data plane, where rollouts run in an actor that has a copy of the generation",
        "what is generated there must not enter the history",
        (
            "rollout_actor=",
            "policy=",
            "val_dataloader=",
            "val_task_to_env=",
            "step=",
            "master_config=",
            "logger=",
            "partition_id=",
        ),
        overridden=True,
    ),
    # --- checkpoints ---------------------------------------------------------------------
    Fact(
        f"{_CHECKPOINTS}.init_tmp_checkpoint",
        Kind.METHOD,
        "makes the empty folder `tmp_step_N`, removing one of that name, and gives its path",
        "our state is written into it",
        ("step", "training_info", "run_config"),
        overridden=True,
    ),
    Fact(
        f"{_CHECKPOINTS}.finalize_checkpoint",
        Kind.METHOD,
        "renames it to `step_N` and removes old ones",
        "our state must be in it by then",
        ("checkpoint_path",),
        overridden=True,
    ),
    Fact(
        f"{_CHECKPOINTS}.begin_finalization",
        Kind.METHOD,
        "does so in a thread, once `wait_fn` has returned",
        "our state must be in it by then",
        ("checkpoint_path", "wait_fn"),
        overridden=True,
    ),
    Fact(
        f"{_CHECKPOINTS}.get_latest_checkpoint_path",
        Kind.METHOD,
        "is the `step_N` of the highest number, as text, or None",
        "a job goes on with our state from there",
    ),
    Fact(
        f"{_CHECKPOINTS}.get_resume_paths",
        Kind.METHOD,
        "needs no instance; names weights and optimizer below a checkpoint, or None for both without one",
        "it is called once, with the checkpoint that a job goes on from",
        ("last_checkpoint_path", "model_component="),
        overridden=True,
    ),
    # --- NeMo-Gym ------------------------------------------------------------------------
    Fact(
        f"{_GYM}:spinup_nemo_gym_actor",
        Kind.FUNCTION,
        "gives the gym the URLs that it is to ask, and is called with names for all that it is passed",
        "our router's URL takes the place of the engines'",
        (*_SPINNING_UP, "tokenizer=", "enable_router_replay=", "routed_experts_dtype=", "use_fastokens="),
        overridden=True,
    ),
    *(
        Fact(
            f"{module}:spinup_nemo_gym_actor",
            Kind.CONSTANT,
            "is looked up by its bare name in this module",
            "it is wrapped there",
        )
        for module in (f"{_ALGORITHMS}.grpo", f"{_CONTROLLER}.setup")
    ),
    Fact(
        f"{_ALGORITHMS}.distillation:NemoGymConfig",
        Kind.CONSTANT,
        "is called in this module with the URLs by name, as distillation starts its gym by itself",
        "wrapping the function above does not reach it",
    ),
    Fact(
        f"{_GYM}:NemoGymConfig.base_urls",
        Kind.KEY,
        "goes to the gym as `policy_base_url`, one URL or several in rotation",
        "one of our router's is enough",
    ),
    Fact(
        f"{_GYM}:setup_nemo_gym_config",
        Kind.FUNCTION,
        "has engines be asynchronous and expose their HTTP servers, and forbids stop strings",
        "each engine then has a server that our router can stand before",
        ("config", "tokenizer"),
    ),
    # --- the router of the single controller ---------------------------------------------
    Fact(
        f"{_CONTROLLER}.setup:_maybe_start_generation_router",
        Kind.FUNCTION,
        "makes the router if it is enabled, or gives None, and is looked up by its bare name in this module",
        "it is wrapped to make ours",
        ("generation", "master_config"),
        overridden=True,
    ),
    Fact(
        f"{_CONTROLLER}.setup:GenerationRouterActor",
        Kind.ACTOR,
        "is made in this module by its bare name, with `options` and names for all arguments; Ray makes it "
        "again after a crash, with the same port",
        "one of ours takes its place, and must have all of its state after `__init__`",
    ),
    Fact(
        f"{_ROUTER}.__init__",
        Kind.METHOD,
        "knows all backends that there will be, and takes all of them for serving until it is told",
        "ours is made with the same arguments",
        (
            "backend_urls=",
            "host=",
            "port=",
            "backend_timeout_s=",
            "connect_timeout_s=",
            "no_healthy_backend_status=",
            "health_managed=",
        ),
        overridden=True,
    ),
    Fact(
        f"{_ROUTER}.base_url",
        Kind.METHOD,
        "is `http://HOST:PORT/v1` for the life of the run",
        "the gym is told once",
        overridden=True,
    ),
    Fact(
        f"{_ROUTER}.set_serving_backends",
        Kind.METHOD,
        "takes the full set of those that serve, and passes over unknown ones",
        "the controller tells ours in this way",
        ("urls",),
        overridden=True,
    ),
    Fact(
        f"{_ROUTER}.drain_backend_failures",
        Kind.METHOD,
        "gives failures by URL since it was last asked, without those that had none",
        "the controller reports them to fleet health",
        overridden=True,
    ),
    Fact(
        f"{_ROUTER}.metrics",
        Kind.METHOD,
        "gives numbers under `router/`",
        "ours are read in the same way",
        overridden=True,
    ),
    Fact(
        f"{_ROUTER}.is_serving",
        Kind.METHOD,
        "is whether the thread of its server lives",
        "ours is asked that too",
        overridden=True,
    ),
    Fact(
        f"{_ROUTER}.build_app",
        Kind.METHOD,
        "serves /v1/chat/completions, /v1/responses, /v1/models and /tokenize by any method, and nothing "
        "else",
        "an environment that runs with it has to run with ours",
    ),
    Fact(
        f"{_ROUTER}._on_backend_error",
        Kind.METHOD,
        "answers 500 for a backend that failed while another one serves, else `no_healthy_backend_status`; "
        "with health managed that backend gets nothing more until it is told to serve again",
        "the gym tries 429, 500, 502, 503, 504 and 520 again, all but 500 without bound",
        ("backend", "error"),
    ),
    *(
        Fact(f"{_ROUTER_CONFIG}.{key}", Kind.KEY, relied, "ours is configured by the same block")
        for key, relied in (
            ("enabled", "has the gym be told of the router only"),
            ("port_range_low", "begins the range of its port"),
            ("port_range_high", "ends it"),
            ("backend_timeout_s", "bounds a whole generation"),
            ("connect_timeout_s", "bounds connecting"),
            ("no_healthy_backend_status", "is one that the gym does not try again, 409 by default"),
        )
    ),
    Fact(
        f"{_CONTROLLER}.config:_GYM_RETRY_STATUSES",
        Kind.CONSTANT,
        "are the statuses after which the gym asks again",
        "ours answers with none of them but 500",
    ),
    # --- rollouts ------------------------------------------------------------------------
    *(
        Fact(
            actor,
            Kind.ACTOR,
            "is given a copy of the generation object, and runs with the interpreter of vLLM's workers",
            "the object must survive being copied, and this package be found there",
        )
        for actor in (
            f"{_ALGORITHMS}.async_utils:AsyncTrajectoryCollector",
            "nemo_rl.experience.sync_rollout_actor:SyncRolloutActor",
        )
    ),
    Fact(
        "nemo_rl.experience.rollouts:run_multi_turn_rollout",
        Kind.FUNCTION,
        "asks for a turn with all tokens of the turn before, answer included, in a batch that shrinks",
        "a trajectory is known again by them",
        ("policy_generation", "input_batch", "tokenizer", "task_to_env", "max_seq_len"),
    ),
    Fact(
        "nemo_rl.experience.rollouts:run_async_multi_turn_rollout",
        Kind.FUNCTION,
        "does so for each trajectory by itself, in batches of one",
        "a trajectory is known again by them",
        ("policy_generation", "input_batch", "tokenizer", "task_to_env", "max_seq_len"),
    ),
)
"""Facts of what makes a generation, and of what stands around it."""
