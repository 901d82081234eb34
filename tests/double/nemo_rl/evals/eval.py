from nemo_rl.models.generation.vllm import VllmGeneration

__all__ = ["VllmGeneration"]
