"""vLLM's own scheduler and block pool over a model that only says which token comes next: real scheduling in
microseconds, without weights, workers or time."""

import json
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
MAX_MODEL_LEN = 1024
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "vocab_size": 1000,
    "torch_dtype": "float32",
}


def make_config(folder: Path, *, caching: bool, max_seqs: int = 16) -> VllmConfig:
    """vLLM's configuration for a model that is a configuration and nothing else."""
    (folder / "config.json").write_text(json.dumps(_MODEL))
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", seed=0)
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=caching),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=256,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )


def make_scheduler(config: VllmConfig, blocks: int) -> Scheduler:
    """vLLM's scheduler with a pool of so many blocks (one of which is vLLM's null block) in one group."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config.cache_config.num_gpu_blocks = blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )


class Engine:
    """Steps a scheduler. Every sampled token is 7; what a request is allowed to generate is all that ends
    it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK, hash_fn)
        self.answers: dict[str, Any] = {}
        """The `kv_transfer_params` that ended requests were answered with."""

    @property
    def pool(self) -> Any:
        """The block pool."""
        return self.scheduler.kv_cache_manager.block_pool

    def add(
        self,
        request_id: str,
        tokens: list[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Request:
        """A request arrives."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        request = Request(request_id, tokens, sampling, None, block_hasher=self._hasher, **fields)
        self.scheduler.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        """One step: what was scheduled."""
        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        sampled = [[] if self.scheduler.requests[name].is_prefill_chunk else [7] for name in names]
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for ended in outputs.outputs:
                if ended.finish_reason is not None:
                    self.answers[ended.request_id] = ended.kv_transfer_params
        return scheduled

    def run(self, max_steps: int = 2_000) -> list[SchedulerOutput]:
        """Step until nothing is left to do."""
        taken = []
        while self.scheduler.has_unfinished_requests():
            taken.append(self.step())
            assert len(taken) < max_steps, "a request is stuck"
        return taken
