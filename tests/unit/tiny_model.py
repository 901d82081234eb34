"""A random Llama that is trained in milliseconds."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def write_tiny_model(folder: Path, *, tied: bool, seed: int = 0, **changes: int) -> Path:
    """A model of 64 words in a Hugging Face folder."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(**shape | changes, tie_word_embeddings=tied, initializer_range=0.3)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
