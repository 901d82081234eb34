"""A small engine behind vLLM's names, for faults by the thousand; see `tools.chaos_bench`.

It keeps the interface that an embedded replica uses, each part at the path where vLLM has it:
`AsyncLLM`, its scheduler with continuous batching, preemption and a prefix cache with salts, the
worker that an extension is mixed into and the model runner that a drafter reads. The model behind
it is `tools.chaos_bench.model`, and `tools.chaos_bench.faults` says what goes wrong when.
"""

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLMEngine

__version__ = "0.28.0+fake"

__all__ = ["AsyncEngineArgs", "AsyncLLMEngine", "CompletionOutput", "RequestOutput", "SamplingParams"]
