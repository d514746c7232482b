"""vLLM's side of `scheduler_step.py`, in vLLM's environment. Receives sizes, and sends (median, mean) step times in µs.

Arguments: the file descriptor of the connection, a checkpoint, steps per round, steps at its beginning to skip.
"""

import os
import statistics
import sys
import time
from multiprocessing.connection import Connection

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 20000, 2048


def make_scheduler(checkpoint: str, num_seqs: int) -> Scheduler:
    """vLLM's default scheduler, synchronous, with prefix caching."""
    config = VllmConfig(
        model_config=ModelConfig(model=checkpoint, dtype="bfloat16", max_model_len=MAX_MODEL_LEN),
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=65536,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        parallel_config=ParallelConfig(),
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=4, head_size=32, dtype=torch.bfloat16)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def measure(checkpoint: str, num_requests: int, num_steps: int, num_skipped: int) -> tuple[float, float]:
    """One round of vLLM's scheduler."""
    hash_function = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
    scheduler = make_scheduler(checkpoint, max(num_requests, 2))
    for i in range(num_requests):
        scheduler.add_request(
            Request(
                request_id=str(i),
                prompt_token_ids=[(i * 7 + j) % 8000 for j in range(32)],
                sampling_params=SamplingParams(temperature=0, max_tokens=200, ignore_eos=True),
                pooling_params=None,
                block_hasher=hasher,
            )
        )
    samples = []
    for _ in range(num_steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        ids = list(plan.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[5] for _ in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        resumed = time.perf_counter()
        scheduler.update_from_output(plan, output)
        samples.append(time.perf_counter() - resumed + scheduled - start)
    steady = samples[num_skipped:]
    return statistics.median(steady) * 1e6, statistics.fmean(steady) * 1e6


def main() -> None:
    """Measure sizes until the connection is closed."""
    descriptor, checkpoint, num_steps, num_skipped = sys.argv[1:]
    with Connection(int(descriptor)) as connection:
        while True:
            try:
                size = connection.recv()
            except EOFError:
                return
            connection.send(measure(checkpoint, size, int(num_steps), int(num_skipped)))


if __name__ == "__main__":
    main()
