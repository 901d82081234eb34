"""What is relied on where weights are updated: each way ends in a call of the engine's `collective_rpc`."""

from __future__ import annotations

from nemo_war.generation.nemo_rl.facts.fact import Asks, Fact, Kind

_VLLM = "nemo_rl.models.generation.vllm"
_GENERATION = f"{_VLLM}.vllm_generation:VllmGeneration"
_SYNC = f"{_VLLM}.vllm_worker:VllmGenerationWorkerImpl"
_ASYNC = f"{_VLLM}.vllm_worker_async:VllmAsyncGenerationWorkerImpl"
_EXTENSION = f"{_VLLM}.vllm_backend:VllmInternalWorkerExtension"

UPDATES = ("update_weights_via_ipc_zmq", "update_weights_from_collective", "nccl_reshard_refit")
"""Updates that the generation object, its workers and their extension have methods of one name for."""

FACTS = (
    *(
        Fact(
            f"{_GENERATION}.{update}",
            Kind.METHOD,
            "has each leader's method of this name called, and gives what is to be waited for",
            "that the weights are there is known to workers only, so that the driver's side is left alone",
        )
        for update in UPDATES
    ),
    *(
        Fact(
            f"{_SYNC}.{update}",
            Kind.METHOD,
            "calls the engine's `collective_rpc` with its own name, and is false where that raises",
            "the guard knows the update by that name, and a reset that was refused fails the update",
        )
        for update in UPDATES
    ),
    *(
        Fact(
            f"{_ASYNC}.{update}_async",
            Kind.METHOD,
            "does so too, with the name that has no `_async`",
            "the guard knows the update by that name, and a reset that was refused fails the update",
            asks=Asks.COROUTINE,
        )
        for update in UPDATES
    ),
    Fact(
        f"{_SYNC}.checkpoint_engine_rpc",
        Kind.METHOD,
        "passes a method's name on to `collective_rpc`; `update_weights_from_checkpoint_engine` is the one "
        "that changes weights",
        "checkpoint engines call workers past the generation object",
        ("checkpoint_method", "method_args"),
    ),
    Fact(
        f"{_ASYNC}.checkpoint_engine_rpc_async",
        Kind.METHOD,
        "does so too",
        "checkpoint engines call workers past the generation object",
        ("checkpoint_method", "method_args"),
        asks=Asks.COROUTINE,
    ),
    Fact(
        f"{_VLLM}.vllm_sparse_refit:VllmSparseRefitReceiver._refit_collective_rpc",
        Kind.METHOD,
        "is how sparse updates get from a worker's HTTP server to the engine's `collective_rpc`, from a "
        "thread of its own",
        "the guard sees them",
        ("method", "args"),
    ),
    Fact(
        _EXTENSION,
        Kind.CLASS,
        "is mixed into vLLM's workers, for all transports but checkpoint engines",
        "ours extends it",
    ),
    Fact(
        f"{_EXTENSION}WithCheckpointEngine",
        Kind.CLASS,
        "takes its place for checkpoint engines",
        "ours extends it",
    ),
    *(
        Fact(
            f"{_EXTENSION}.{update}",
            Kind.METHOD,
            "loads the weights that were sent into its worker's model",
            "caches are void after it",
        )
        for update in UPDATES
    ),
    Fact(
        f"{_EXTENSION}WithCheckpointEngine.update_weights_from_checkpoint_engine",
        Kind.METHOD,
        "does so with those that a checkpoint engine brings",
        "caches are void after it",
    ),
    Fact(
        f"{_EXTENSION}.update_weights_from_decoded_sparse_payload",
        Kind.METHOD,
        "changes some of them; an update has any number of such calls",
        "none of them is the end of the update",
        ("*payloads",),
    ),
    Fact(
        f"{_EXTENSION}.finish_sparse_delta_refit",
        Kind.METHOD,
        "is the end of an update that changed anything",
        "the next policy epoch begins after it",
    ),
    Fact(
        f"{_EXTENSION}.prepare_refit_info",
        Kind.METHOD,
        "takes names and shapes before the first update, and changes no weights",
        "no epoch begins with it",
        ("state_dict_info",),
    ),
)
"""Facts of the five transports."""
