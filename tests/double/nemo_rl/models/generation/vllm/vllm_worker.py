from __future__ import annotations

from typing import Any

import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import verify_right_padding
from nemo_rl.models.generation.vllm.checkpoint_engine import VllmCheckpointEngineRpcMixin

from tests.double.engine import FakeLLM, SamplingParams

_EXTENSION = "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtension"


def _resolve_enable_prefix_caching(vllm_cfg: dict[str, Any]) -> bool:
    return vllm_cfg.get("enable_prefix_caching") is not False


class BaseVllmGenerationWorker:
    def __init__(
        self,
        config: Any,
        bundle_indices: list[int] | None = None,
        fraction_of_gpus: float = 1.0,
        seed: int | None = None,
        extra_env_vars: list[str] | None = None,
        defer_model_load: bool = False,
    ) -> None:
        self.cfg, self.llm, self._deferred = config, None, (bundle_indices, seed)
        if not defer_model_load:
            self.load_model()

    @staticmethod
    def configure_worker(
        num_gpus: float,
        bundle_indices: tuple[int, list[int]] | None = None,
        num_gpus_per_node: int | None = None,
    ) -> tuple[dict[str, Any], dict[str, str], dict[str, Any], dict[str, Any]]:
        if bundle_indices is None:
            return {"num_gpus": 0}, {}, {}, {}
        node, bundles = bundle_indices
        seed = node * 1024 + bundles[0] // len(bundles)
        return {"num_gpus": num_gpus}, {}, {"bundle_indices": bundles, "seed": seed}, {}

    def load_model(self) -> None:
        if self._deferred[0] is not None:
            self._load_model(*self._deferred)

    def _load_model(self, bundle_indices: list[int], seed: int) -> None:
        self.SamplingParams = SamplingParams
        kind = "WithCheckpointEngine" if self.cfg.get("refit_transport") == "nixl" else ""
        self._create_engine(
            {
                "model": self.cfg["model_name"],
                "load_format": self.cfg["vllm_cfg"]["load_format"],
                "seed": seed,
                "worker_extension_cls": _EXTENSION + kind,
                **self.cfg.get("vllm_kwargs", {}),
            }
        )

    def _build_sampling_params(self, *, greedy: bool) -> Any:
        return self.SamplingParams(
            max_tokens=self.cfg["max_new_tokens"], temperature=0.0 if greedy else self.cfg["temperature"]
        )

    def _get_raw_spec_counters(self) -> dict[str, float]:
        return {"vllm:spec_decode_num_drafts": 0.0}

    def is_alive(self) -> bool:
        return True


def prompts_of(data: Any) -> list[dict[str, Any]]:
    lengths = data["input_lengths"].tolist()
    return [
        {"prompt_token_ids": row[:length].tolist()}
        for row, length in zip(data["input_ids"], lengths, strict=True)
    ]


def answer_of(prompt: dict[str, Any], output: Any) -> BatchedDataDict:
    """A batch of one."""
    asked, text = prompt["prompt_token_ids"], output.outputs[0]
    said = [each[token].logprob for token, each in zip(text.token_ids, text.logprobs, strict=True)]
    return BatchedDataDict(
        {
            "output_ids": torch.tensor([[*asked, *text.token_ids]]),
            "logprobs": torch.tensor([[*[0.0] * len(asked), *said]]),
            "generation_lengths": torch.tensor([len(text.token_ids)]),
            "unpadded_sequence_lengths": torch.tensor([len(asked) + len(text.token_ids)]),
            "truncated": torch.tensor([text.finish_reason == "length"]),
        }
    )


class VllmGenerationWorkerImpl(VllmCheckpointEngineRpcMixin, BaseVllmGenerationWorker):
    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        self.llm = FakeLLM(llm_kwargs)

    def post_init(self) -> None:
        self.llm.collective_rpc("report_device_id", args=())

    def generate(self, data: Any, greedy: bool = False) -> Any:
        if not len(data["input_ids"]):
            none = torch.zeros(0)
            return BatchedDataDict({"output_ids": torch.zeros((0, 0)), "generation_lengths": none})
        verify_right_padding(data, self.cfg["_pad_token_id"])
        prompts = prompts_of(data)
        outputs = self.llm.generate(prompts, self._build_sampling_params(greedy=greedy), use_tqdm=False)
        return BatchedDataDict.from_batches(
            [answer_of(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)],
            {"output_ids": self.cfg["_pad_token_id"]},
        )

    def generate_text(self, data: Any, greedy: bool = False) -> Any:
        outputs = self.llm.generate(
            data["prompts"], self._build_sampling_params(greedy=greedy), use_tqdm=False
        )
        return BatchedDataDict({"texts": [output.outputs[0].text for output in outputs]})

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        self.llm.collective_rpc("prepare_refit_info", args=(state_dict_info,))

    def update_weights_via_ipc_zmq(self) -> bool:
        return self._update("update_weights_via_ipc_zmq")

    def update_weights_from_collective(self) -> bool:
        return self._update("update_weights_from_collective")

    def nccl_reshard_refit(self) -> bool:
        return self._update("nccl_reshard_refit")

    def reset_prefix_cache(self) -> None:
        self.llm.llm_engine.reset_prefix_cache()

    def sleep(self) -> None:
        self.llm.llm_engine.reset_prefix_cache()
        self.llm.sleep(level=1)

    def wake_up(self, **kwargs: Any) -> None:
        self.llm.wake_up(**kwargs)

    def _update(self, method: str) -> bool:
        try:
            return all(self.llm.collective_rpc(method, args=()))
        except Exception:
            return False


@ray.remote
class VllmGenerationWorker(VllmGenerationWorkerImpl):
    pass
