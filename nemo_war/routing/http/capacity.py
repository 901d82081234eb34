"""How much a replica's KV cache holds, read off what it tells Prometheus."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

_NAME = "vllm:cache_config_info"
_MOST = 1 << 40


def kv_tokens(metrics: str) -> int:
    """Tokens of KV cache, of all engines behind the address; 0 where the text does not say.

    Args:
        metrics: in Prometheus' text format; vLLM's is understood.
    """
    lines = "\n".join(line for line in metrics.splitlines() if line.startswith(_NAME))
    try:
        samples = [sample for family in text_string_to_metric_families(lines) for sample in family.samples]
        total = sum(int(each.labels["num_gpu_blocks"]) * int(each.labels["block_size"]) for each in samples)
        return total if 0 <= total <= _MOST else 0
    except (KeyError, ValueError):
        return 0
