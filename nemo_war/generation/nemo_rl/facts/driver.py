"""What is relied on in the processes that ask for generations."""

from __future__ import annotations

from nemo_war.generation.nemo_rl.facts.fact import Asks, Fact, Kind

_VLLM = "nemo_rl.models.generation.vllm"
_GENERATION = f"{_VLLM}.vllm_generation:VllmGeneration"
_INTERFACES = "nemo_rl.models.generation.interfaces"
_BATCH = "nemo_rl.distributed.batched_data_dict:BatchedDataDict"
_GROUP = "nemo_rl.distributed.worker_groups:RayWorkerGroup"
_REGISTRY = "nemo_rl.distributed.ray_actor_environment_registry"
_HEALTH = "nemo_rl.models.generation.fleet_health"
_FAILURES = "nemo_rl.experience.failures"
_ASKING = ("data", "greedy")

FACTS = (
    # --- the generation object -----------------------------------------------------------
    Fact(
        _GENERATION,
        Kind.CLASS,
        "can be subclassed, and Ray sends an instance of a subclass as that subclass",
        "a drop-in passes every isinstance check, in every process",
    ),
    Fact(
        f"{_VLLM}:VllmGeneration",
        Kind.CLASS,
        "the package offers the class under its own name too, and algorithms take it from there",
        "it is replaced there before they are imported",
    ),
    Fact(
        f"{_GENERATION}.__init__",
        Kind.METHOD,
        "keeps the given configuration as `cfg`, makes one worker per engine, and calls `_post_init` unless "
        "models are to be loaded later",
        "our block is in that configuration",
        ("cluster", "config"),
    ),
    Fact(
        f"{_GENERATION}.load_and_start",
        Kind.METHOD,
        "loads models that were put off, and calls `_post_init` then",
        "drafters are attached in that case too",
    ),
    Fact(
        f"{_GENERATION}._post_init",
        Kind.METHOD,
        "is called once, when all engines are there and before any request",
        "drafters are attached there",
        overridden=True,
    ),
    Fact(
        f"{_GENERATION}.init_cluster_placement_groups",
        Kind.METHOD,
        "needs no instance, and is called on the class by its bare name",
        "the class that stands in has to have it",
        ("cluster", "config"),
    ),
    Fact(
        f"{_GENERATION}.generate_async",
        Kind.METHOD,
        "passes its batch of one on to `_async_generate_base`",
        "turns are placed there",
        _ASKING,
        asks=Asks.GENERATOR,
    ),
    Fact(
        f"{_GENERATION}.generate_text_async",
        Kind.METHOD,
        "does so too, with texts under `prompts` in place of tokens",
        "such requests are told apart and left to NeMo-RL",
        _ASKING,
        asks=Asks.GENERATOR,
    ),
    Fact(
        f"{_GENERATION}._async_generate_base",
        Kind.METHOD,
        "sends a batch of one, and every key in it, to one shard's leader, yields its answer, and cancels "
        "the call when it is cancelled itself",
        "what the turn says of itself is one more key",
        ("data", "method_name", "data_validation_fn", "greedy"),
        overridden=True,
        asks=Asks.GENERATOR,
    ),
    Fact(
        f"{_GENERATION}._next_dp_shard_idx",
        Kind.METHOD,
        "is asked once for each request, by the task that sends it and before it waits for anything",
        "the scheduler's choice is handed over in a context variable",
        overridden=True,
    ),
    Fact(
        f"{_GENERATION}._generate_on_shard",
        Kind.METHOD,
        "tells the fleet monitor of failures and successes, raises Ray's errors and timeouts as "
        "`GenerationUnavailable`, and adds `gen_leader_worker_idx`",
        "all of that is left to it",
        ("data=", "method_name=", "greedy=", "dp_shard_idx=", "leader_worker_idx="),
        asks=Asks.GENERATOR,
    ),
    Fact(
        f"{_GENERATION}.generate",
        Kind.METHOD,
        "cuts the batch by position, each shard getting the rounded-up share and the last ones what is left, "
        "and joins the answers in that order",
        "rows are put into an order that leaves trajectories at home",
        _ASKING,
        overridden=True,
    ),
    Fact(
        f"{_GENERATION}.generate_text",
        Kind.METHOD,
        "does so for texts, through the workers' method of the same name",
        "such requests are left to NeMo-RL",
        _ASKING,
    ),
    Fact(
        f"{_GENERATION}.shutdown",
        Kind.METHOD,
        "ends the workers, may be called again, and is called when the object is deleted",
        "the front ends with it",
        overridden=True,
    ),
    # --- around a phase of generation ----------------------------------------------------
    Fact(
        f"{_GENERATION}.prepare_for_generation",
        Kind.METHOD,
        "wakes engines that share GPUs with training, by tags where some are given; others need nothing",
        "a step begins here, for placement and for the comparison within a job",
        ("*args", "**kwargs"),
        overridden=True,
    ),
    Fact(
        f"{_GENERATION}.finish_generation",
        Kind.METHOD,
        "resets prefix caches, and puts engines to sleep that share GPUs with training",
        "a step ends here: histories are exchanged and trajectories are over",
        ("*args", "**kwargs"),
        overridden=True,
    ),
    Fact(
        f"{_GENERATION}.invalidate_kv_cache",
        Kind.METHOD,
        "has every leader reset its prefix cache, and is true where none of them says false; stock workers "
        "say nothing",
        "ours say what vLLM said",
        overridden=True,
    ),
    Fact(
        f"{_GENERATION}.snapshot_step_metrics",
        Kind.METHOD,
        "marks the beginning of a step's metrics",
        "ours count from there too",
        overridden=True,
    ),
    Fact(
        f"{_GENERATION}.get_step_metrics",
        Kind.METHOD,
        "gives scalars since that mark, which are logged under `train/`, and nothing without a mark",
        "ours are added to them",
        overridden=True,
    ),
    Fact(
        f"{_GENERATION}.get_logger_metrics",
        Kind.METHOD,
        "gives four series by shard, which are plotted over a step",
        "its keys must stay these four",
        overridden=True,
    ),
    # --- what the object holds -----------------------------------------------------------
    Fact(
        f"{_GENERATION}.cfg",
        Kind.ATTRIBUTE,
        "is the configuration of the generation, a dictionary",
        "rollouts and we read it there",
    ),
    Fact(
        f"{_GENERATION}.dp_size",
        Kind.ATTRIBUTE,
        "is the number of engines",
        "batches are cut into so many",
    ),
    Fact(
        f"{_GENERATION}.worker_group",
        Kind.ATTRIBUTE,
        "is the group of all workers",
        "drafters are called through it",
    ),
    Fact(
        f"{_GENERATION}.fleet_monitor",
        Kind.ATTRIBUTE,
        "is None until fleet health is attached",
        "shards that do not serve are not chosen",
    ),
    Fact(
        f"{_GENERATION}.current_generate_dp_shard_idx",
        Kind.ATTRIBUTE,
        "is the next shard of the rotation without fleet health",
        "it tells main from older versions, which have no `_next_dp_shard_idx`",
    ),
    Fact(
        f"{_GENERATION}.dp_openai_server_base_urls",
        Kind.ATTRIBUTE,
        "are the engines' HTTP servers, one for each shard, known before models are loaded where loading was "
        "put off",
        "our router stands before them",
    ),
    # --- the worker class, and its environment -------------------------------------------
    Fact(
        f"{_VLLM}.vllm_generation:resolve_generation_worker_cls",
        Kind.FUNCTION,
        "is looked up in this module whenever a generation is made, and answers with the dotted name of the "
        "worker class; that of the default unless `quant_cfg` is set",
        "it is wrapped there to answer with ours",
        ("default_cls", "config"),
    ),
    Fact(
        f"{_REGISTRY}:ACTOR_ENVIRONMENT_REGISTRY",
        Kind.CONSTANT,
        "maps dotted names of actor classes to interpreters, and may be added to",
        "our workers are registered with stock workers' interpreter",
    ),
    Fact(
        f"{_REGISTRY}:get_actor_python_env",
        Kind.FUNCTION,
        "raises ValueError for a name that is not there",
        "so that ours must be",
        ("actor_class_fqn",),
    ),
    Fact(
        "nemo_rl.utils.venvs:create_local_venv_on_each_node",
        Kind.FUNCTION,
        "makes an environment that is named after an actor class, and is looked up by its bare name wherever "
        "actors are made",
        "our workers live in those of stock ones",
        ("py_executable", "venv_name"),
        overridden=True,
    ),
    Fact(
        "nemo_rl.distributed.worker_groups:create_local_venv_on_each_node",
        Kind.CONSTANT,
        "is that name in the module that makes workers",
        "it is bound to ours there",
    ),
    Fact(
        "nemo_rl.distributed.virtual_cluster:_get_free_port_local",
        Kind.FUNCTION,
        "is a port that is free on this node",
        "our router listens there",
    ),
    Fact(
        "nemo_rl.distributed.virtual_cluster:_get_node_ip_local",
        Kind.FUNCTION,
        "is this node's address, as other nodes know it",
        "our router listens there",
    ),
    # --- batches -------------------------------------------------------------------------
    Fact(
        _BATCH,
        Kind.CLASS,
        "is a dictionary of tensors and lists with a row for each sample; any key may be added and popped",
        "turns and epochs travel in it",
    ),
    Fact(
        f"{_BATCH}.size",
        Kind.PROPERTY,
        "is the number of rows",
        "batches of one are told from others",
    ),
    Fact(
        f"{_BATCH}.select_indices",
        Kind.METHOD,
        "is a new batch of these rows in this order, lists of any objects included",
        "the order of rows is changed, and restored",
        ("indices",),
    ),
    Fact(
        f"{_BATCH}.shard_by_batch_size",
        Kind.METHOD,
        "gives exactly as many shards as asked for, cut by position, the last ones smaller or empty",
        "which row goes where is known beforehand",
        ("shards", "allow_uneven_shards="),
    ),
    Fact(
        f"{_BATCH}.from_batches",
        Kind.METHOD,
        "joins batches row by row, lists included, and leaves out keys of none but empty ones",
        "epochs of all shards are read from one list",
        ("batches", "pad_value_dict"),
    ),
    *(
        Fact(
            f"{_INTERFACES}:GenerationDatumSpec.{key}",
            Kind.KEY,
            "is all that rollouts say of a turn, but for media",
            "trajectories are told from their tokens",
        )
        for key in ("input_ids", "input_lengths", "stop_strings")
    ),
    *(
        Fact(
            f"{_INTERFACES}:GenerationOutputSpec.{key}",
            Kind.KEY,
            "is in every answer, right-padded, prompts included",
            "answers must have these keys with us as without",
        )
        for key in ("output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs", "truncated")
    ),
    Fact(
        f"{_INTERFACES}:verify_right_padding",
        Kind.FUNCTION,
        "says whether all beyond a row's length is padding",
        "the tests hold our answers against it",
        ("data", "pad_value"),
    ),
    # --- groups of workers ---------------------------------------------------------------
    Fact(
        f"{_GROUP}.workers",
        Kind.PROPERTY,
        "are handles of Ray actors, by number",
        "drafters are called on them",
    ),
    Fact(
        f"{_GROUP}.dp_size",
        Kind.PROPERTY,
        "is the number of engines",
        "each has one leader",
    ),
    Fact(
        f"{_GROUP}.get_dp_leader_worker_idx",
        Kind.METHOD,
        "is the number of the worker that holds a shard's engine",
        "only that one has a drafter",
        ("dp_shard_idx",),
    ),
    # --- fleet health, with the single controller only -----------------------------------
    Fact(
        f"{_HEALTH}:GenerationFleetHealth.serving_shards",
        Kind.METHOD,
        "are the shards that may be given requests now; one comes back only after a refit",
        "placement chooses among these",
    ),
    Fact(
        f"{_HEALTH}:HealthyShardSelector.acquire",
        Kind.METHOD,
        "counts a request on the shard that was chosen, whoever chose it",
        "its counts stay right though the choice is ours",
        ("shard_idx",),
    ),
    Fact(
        f"{_HEALTH}:HealthyShardSelector.release",
        Kind.METHOD,
        "counts it no more, however it ended",
        "its counts stay right though the choice is ours",
        ("shard_idx",),
    ),
    Fact(
        f"{_FAILURES}:GenerationUnavailable",
        Kind.CLASS,
        "is an error after which a rollout is tried again",
        "it has to reach the rollout as it is",
    ),
    Fact(
        f"{_FAILURES}:NoHealthyShards",
        Kind.CLASS,
        "is one too, for a fleet of which nothing serves",
        "it has to reach the rollout as it is",
    ),
)
"""Facts of `VllmGeneration` and what it is asked with."""
