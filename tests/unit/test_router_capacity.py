"""What a KV cache holds, as replicas tell Prometheus."""

from __future__ import annotations

import pytest

from nemo_war.routing.http.capacity import kv_tokens

OTHERS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
"""


def info(blocks: str, size: str, engine: int = 0) -> str:
    return (
        f'vllm:cache_config_info{{block_size="{size}",cache_dtype="auto",enable_prefix_caching="True",'
        f'engine="{engine}",num_gpu_blocks="{blocks}",sliding_window="None"}} 1.0\n'
    )


def test_it_is_blocks_times_their_size() -> None:
    assert kv_tokens(OTHERS + info("1200", "16")) == 19_200


def test_engines_behind_one_address_add_up() -> None:
    assert kv_tokens(OTHERS + info("100", "16") + info("100", "16", engine=1)) == 3_200


@pytest.mark.parametrize(
    "text",
    [
        "",
        OTHERS,
        info("None", "16"),
        "vllm:cache_config_info{ 1.0",
        'vllm:cache_config_info{block_size="16"} 1.0',
        "vllm:cache_config_info\n",
        "\x00\ufffd" * 100,
    ],
)
def test_where_it_does_not_say_it_is_unknown(text: str) -> None:
    assert kv_tokens(text) == 0
