VLLM_EXECUTABLE = "python-of-vllm"
_VLLM = "nemo_rl.models.generation.vllm"
ACTOR_ENVIRONMENT_REGISTRY = {
    f"{_VLLM}.vllm_worker.VllmGenerationWorker": VLLM_EXECUTABLE,
    f"{_VLLM}.vllm_worker_async.VllmAsyncGenerationWorker": VLLM_EXECUTABLE,
}


def get_actor_python_env(actor_class_fqn: str) -> str:
    if actor_class_fqn not in ACTOR_ENVIRONMENT_REGISTRY:
        raise ValueError(f"no interpreter is known for {actor_class_fqn}")
    return ACTOR_ENVIRONMENT_REGISTRY[actor_class_fqn]
