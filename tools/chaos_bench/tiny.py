"""A policy that is trained in milliseconds, and its tokenizer, in a Hugging Face folder.

The tokenizer has a token for each byte and some that are a whole tool call, so that what a fake engine
says at random earns a reward now and then, and each step moves the weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from tools.chaos_bench.model import FIRST_TOKEN

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALLS = 5
"""Of some 290 tokens so many are a tool call: most siblings make one sooner or later, and not all."""
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_policy(folder: Path) -> Path:
    """Write it into a folder that is made."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    size = _write_tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path) -> int:
    """Returns how many tokens there are."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    unused = [f"<|unused{number}|>" for number in range(len(_SPECIAL), FIRST_TOKEN)]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*_SPECIAL, *unused, *letters]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in [*_SPECIAL, *unused]])
    tokenizer.add_tokens([f"<calc>{number}+{number}</calc>" for number in range(100, 100 + _CALLS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[1],
        "eos_token": _SPECIAL[2],
        "pad_token": _SPECIAL[2],
        "unk_token": _SPECIAL[0],
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=1))
    return tokenizer.get_vocab_size()
