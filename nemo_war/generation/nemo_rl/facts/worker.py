"""What is relied on in the workers that hold engines."""

from __future__ import annotations

from nemo_war.generation.nemo_rl.facts.fact import Asks, Fact, Kind

_VLLM = "nemo_rl.models.generation.vllm"
_BASE = f"{_VLLM}.vllm_worker:BaseVllmGenerationWorker"
_SYNC = f"{_VLLM}.vllm_worker:VllmGenerationWorkerImpl"
_ASYNC = f"{_VLLM}.vllm_worker_async:VllmAsyncGenerationWorkerImpl"
_CONFIG = f"{_VLLM}.config"
_ASKING = ("data", "greedy")

FACTS = (
    Fact(
        f"{_VLLM}.vllm_worker:VllmGenerationWorker",
        Kind.ACTOR,
        "is the actor of a synchronous engine, and this its dotted name",
        "ours stands in for it",
    ),
    Fact(
        f"{_VLLM}.vllm_worker_async:VllmAsyncGenerationWorker",
        Kind.ACTOR,
        "is the actor of an asynchronous engine, and this its dotted name",
        "ours stands in for it",
    ),
    # --- how an engine comes to be -------------------------------------------------------
    Fact(
        f"{_BASE}.__init__",
        Kind.METHOD,
        "makes an engine where it is given bundles, now or later, and none elsewhere",
        "our actors are made as stock ones are",
        ("config", "bundle_indices", "fraction_of_gpus", "seed", "extra_env_vars", "defer_model_load"),
    ),
    Fact(
        f"{_BASE}.configure_worker",
        Kind.METHOD,
        "is called on the class that stands under the dotted name, and gives each engine a seed of its own",
        "files of a replica are told apart by it",
        ("num_gpus", "bundle_indices", "num_gpus_per_node"),
    ),
    Fact(
        f"{_BASE}._load_model",
        Kind.METHOD,
        "puts together all of the engine's arguments, `worker_extension_cls` and `seed` among them, and ends "
        "with `_create_engine`",
        "what is added there, NeMo-RL does not look at",
        ("bundle_indices", "seed"),
    ),
    Fact(
        f"{_BASE}._get_raw_spec_counters",
        Kind.METHOD,
        "gives all of vLLM's metrics by their Prometheus names, not just those of drafts",
        "hits of the prefix cache are read there",
    ),
    Fact(
        f"{_BASE}.cfg",
        Kind.ATTRIBUTE,
        "is the configuration of the generation",
        "our block is in it",
    ),
    *(
        Fact(
            f"{impl}._create_engine",
            Kind.METHOD,
            f"makes {kind} of these arguments and keeps it as `llm`",
            "extension and drafter are put among the arguments, and the engine gets its guard",
            ("llm_kwargs",),
            overridden=True,
        )
        for impl, kind in ((_SYNC, "an `LLM`"), (_ASYNC, "an `AsyncLLM`"))
    ),
    *(
        Fact(
            f"{impl}.llm",
            Kind.ATTRIBUTE,
            "is the engine, and the only way to it; methods are looked up at each call",
            "the guard replaces two methods on this one object",
        )
        for impl in (_SYNC, _ASYNC)
    ),
    # --- requests ------------------------------------------------------------------------
    Fact(
        f"{_SYNC}.generate",
        Kind.METHOD,
        "makes one call of the engine's `generate` with a prompt for each row, in order, and sampling "
        "parameters for each or for all",
        "turns are matched to prompts by position",
        _ASKING,
        overridden=True,
    ),
    Fact(
        f"{_SYNC}.generate_text",
        Kind.METHOD,
        "does so with the texts under `prompts`",
        "turns of the batch before must not stick to it",
        _ASKING,
        overridden=True,
    ),
    Fact(
        f"{_ASYNC}.generate_async",
        Kind.METHOD,
        "makes one call of the engine's `generate`, by names, in a task that inherits the caller's context",
        "whose turn it is gets there in a context variable",
        _ASKING,
        overridden=True,
        asks=Asks.GENERATOR,
    ),
    Fact(
        f"{_ASYNC}.generate_text_async",
        Kind.METHOD,
        "does so for the texts under `prompts`",
        "turns of the batch before must not stick to it",
        _ASKING,
        overridden=True,
        asks=Asks.GENERATOR,
    ),
    Fact(
        f"{_ASYNC}.report_dp_openai_server_base_url",
        Kind.METHOD,
        "is where the engine's HTTP server listens, or None; it calls the same engine object's `generate`",
        "requests that come by HTTP pass the guard too",
        asks=Asks.COROUTINE,
    ),
    Fact(
        f"{_ASYNC}._setup_vllm_openai_api_server",
        Kind.METHOD,
        "puts routes on a FastAPI application and gives it back, before it is served; `llm` is there by then",
        "the header that says whose turn it is is read by a middleware of ours",
        ("app",),
        overridden=True,
    ),
    # --- caches --------------------------------------------------------------------------
    Fact(
        f"{_SYNC}.reset_prefix_cache",
        Kind.METHOD,
        "resets the prefix cache and drops vLLM's answer",
        "ours gives the answer",
        overridden=True,
    ),
    Fact(
        f"{_ASYNC}.reset_prefix_cache_async",
        Kind.METHOD,
        "asks for a reset that vLLM refuses while requests run, and drops the answer",
        "ours resets for running requests too, and gives the answer",
        overridden=True,
        asks=Asks.COROUTINE,
    ),
    Fact(
        f"{_VLLM}.vllm_worker:_resolve_enable_prefix_caching",
        Kind.FUNCTION,
        "takes null for yes on every GPU that NeMo-RL is run on",
        "only an explicit false contradicts placement",
        ("vllm_cfg",),
    ),
    # --- the configuration that workers and we read --------------------------------------
    *(
        Fact(
            f"{_CONFIG}:VllmConfig.{key}", Kind.KEY, relied, "it is looked at for what contradicts our block"
        )
        for key, relied in (
            ("backend", "names the kind of engine"),
            ("vllm_cfg", "holds NeMo-RL's own settings of the engine"),
            ("vllm_kwargs", "goes to the engine as it is, a drafter under `speculative_config` included"),
            ("quant_cfg", "chooses worker classes of another kind"),
        )
    ),
    Fact(
        f"{_CONFIG}:VllmConfig.max_new_tokens",
        Kind.KEY,
        "bounds every turn",
        "placement is told of it",
    ),
    *(
        Fact(f"{_CONFIG}:VllmSpecificArgs.{key}", Kind.KEY, relied, "an engine is made by it")
        for key, relied in (
            ("async_engine", "chooses between the two kinds of workers"),
            ("pipeline_parallel_size", "is the number of stages of an engine"),
            ("expose_http_server", "has workers start their HTTP servers"),
            ("load_format", "is `dummy` where the first refit brings all weights"),
        )
    ),
    Fact(
        "nemo_rl.models.generation:configure_generation_config",
        Kind.FUNCTION,
        "leaves keys alone that it does not know, and makes `load_format` auto where `vllm_kwargs` has a "
        "drafter",
        "our block gets through, and our drafter must not stand there",
        ("config", "tokenizer"),
    ),
)
"""Facts of stock workers, which ours extend."""
