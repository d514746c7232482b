"""The host's time for launching a prompt's step on a GPU, without a GPU. `host_time.py` runs it.

    TRITON_INTERPRET=0 python benchmarks/prompt_host_time.py

A runner as on a GPU launches steps of one prompt of a model with the shapes of Qwen3's 0.6B. Model, attention and
sampler are those of a GPU, and no CUDA graph is involved. Tensors are on torch's device "meta", which has no memory.
Triton compiles its kernels and launches them, into a driver that does nothing (`tests/support/idle_cuda.py`).

Measured is the CPU time of the thread: what Python, torch's dispatcher and Triton take. CUDA's driver, its caching
allocator, the look-up of pointers, and torch's own launches aren't part of it. Neither is cuBLAS: a matrix product is
one of torch's of 1 × 1 numbers, on the CPU, and the allocation of its result. Inputs aren't copied into pinned memory.
So a host with a GPU takes some microseconds more for each launch and product.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import msgspec
import numpy as np
import torch
from common import table
from host_time import GREEDY, LaunchCount
from idle_cuda import IdleCuda

from raycore.attention.kv_tensors import KVTensors
from raycore.attention.paged import TritonAttention
from raycore.attention.spec import AttentionSpec
from raycore.config import resolve
from raycore.decoder.decoder import Decoder
from raycore.kernels.gpu import rows
from raycore.kernels.gpu.attention import PagedAttention
from raycore.layers.gpu_operations import GpuOperations
from raycore.layers.linear import PlainLinear
from raycore.messages import NewRequest, StepPlan
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.runner.runner import ModelRunner
from raycore.runner.sampling_head import SamplingHead
from raycore.runner.sources import Tokens
from raycore.sampling.gpu import GpuSampling
from raycore.sampling.sampler import Sampler
from raycore.step.batch import SlotBatch
from raycore.step.device_batch import DeviceBatch
from raycore.weights.loader import empty_decoder_weights
from raycore.weights.share import WeightShare

META = torch.device("meta")
NUM_TOKENS = (128, 2048)
NUM_STEPS = 50
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
NUM_BLOCKS = MAX_MODEL_LEN // BLOCK_SIZE
DTYPE = torch.bfloat16
DESCRIPTION: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": MAX_MODEL_LEN,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
ONE = torch.ones(1, 1)


class IdleLinear(PlainLinear):
    """Costs the host a call of torch and an allocation, as on a GPU, and computes next to nothing."""

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        torch.mm(ONE, ONE)
        return torch.empty((len(x_TI), len(self.weight)), dtype=x_TI.dtype, device=META)

    def add_to(self, residual_TO: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
        ONE.addmm_(ONE, ONE, alpha=0.0)
        return residual_TO


@contextmanager
def without_products() -> Iterator[None]:
    """Linear layers are made idle, and no memory is pinned, which takes a GPU."""
    with (
        mock.patch("raycore.layers.operations.make_linear", IdleLinear),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
    ):
        yield


def make_runner() -> ModelRunner:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_bytes(msgspec.json.encode(DESCRIPTION))
        spec = resolve(directory, load_format="dummy").model.spec
    weights = empty_decoder_weights(WeightShare(spec, DTYPE, device=META))
    decoder = Decoder(spec, weights, TensorParallel(), GpuOperations(META))
    attention_spec = AttentionSpec.of(spec, 1, decoder.constants, MAX_MODEL_LEN + 1, DTYPE, META)
    kv = KVTensors(spec.num_layers, 2 * NUM_BLOCKS, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim, DTYPE, META)
    batch = DeviceBatch(SlotBatch(2, MAX_MODEL_LEN, BLOCK_SIZE), META, is_shared=False)
    head = SamplingHead(decoder, batch, Sampler(spec.vocab_size, GpuSampling(META)))
    return ModelRunner(decoder, TritonAttention(attention_spec, kv, 1), batch, Tokens(batch), head)


def prompts(num_tokens: int) -> Iterator[StepPlan]:
    """Steps of a prompt each. Two slots take turns."""
    freed: list[int] = []
    token_ids = np.arange(num_tokens, dtype=np.int32).tobytes()
    for step in count():
        slot = step % 2
        blocks = np.arange(slot * NUM_BLOCKS, slot * NUM_BLOCKS + NUM_BLOCKS // 2, dtype=np.int32).tobytes()
        request = NewRequest(slot, token_ids, num_tokens, 0, blocks, GREEDY, seed=slot)
        yield StepPlan(step, _int32(slot), _int32(num_tokens), freed, [request])
        freed = [slot]


def _int32(number: int) -> bytes:
    return np.array([number], np.int32).tobytes()


class Stopwatch:
    """The CPU time of calls, in seconds, and their number, by what they do."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started_s = time.thread_time()
            result = function(*args, **kwargs)
            self.seconds[name] += time.thread_time() - started_s
            self.calls[name] += 1
            return result

        return timed


TIMED = [
    ("norms", rows, "rms_norm"),
    ("gates", rows, "gate_and_mul"),
    ("keys and values stored", PagedAttention, "write_cache"),
    ("attention", PagedAttention, "attend_chunks"),
    ("matrix products", IdleLinear, "__call__"),
    ("matrix products", IdleLinear, "add_to"),
]


def launch_times(runner: ModelRunner, plans: Iterator[StepPlan]) -> list[float]:
    """Return the CPU time of each of some launches, in seconds."""
    samples: list[float] = []
    for plan in list(islice(plans, NUM_STEPS)):
        started_s = time.thread_time()
        runner.launch(plan)
        samples.append(time.thread_time() - started_s)
    return samples


def of_parts(runner: ModelRunner, plans: Iterator[StepPlan]) -> list[list[str]]:
    """Return a row for each part of a step: how often it comes, and its time."""
    watch = Stopwatch()
    with ExitStack() as patches:
        for name, owner, function in TIMED:
            timed = watch.around(name, getattr(owner, function))
            patches.enter_context(mock.patch.object(owner, function, timed))
        total_s = sum(launch_times(runner, plans))
    rest_s = total_s - sum(watch.seconds.values())
    parts = [(name, watch.calls[name], seconds) for name, seconds in watch.seconds.items()]
    return [
        [name, f"{calls / NUM_STEPS:.0f}", f"{1e6 * seconds / calls:.1f}", f"{1e3 * seconds / NUM_STEPS:.2f}"]
        for name, calls, seconds in [*parts, ("all else", NUM_STEPS, rest_s)]
    ]


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, without_products():
        device = IdleCuda(Path(directory))
        runner = make_runner()
        steps: list[list[str]] = []
        for num_tokens in NUM_TOKENS:
            plans = prompts(num_tokens)
            launch_times(runner, plans)  # compiles kernels
            num_before, plan = device.num_launches, next(plans)
            with LaunchCount() as operations:
                runner.launch(plan)
            num_launches = device.num_launches - num_before
            times_ms = [1e3 * seconds for seconds in launch_times(runner, plans)]
            counts = str(num_launches), str(len(operations.names))
            steps.append([f"{num_tokens:,}", *counts, f"{median(times_ms):.2f}", f"{min(times_ms):.2f}"])
        parts = of_parts(runner, plans)
    print(table([["tokens", "kernels of Triton", "operations of torch", "ms, median", "ms, least"], *steps]))
    print("\n" + table([["part of the last step", "in a step", "µs each", "ms"], *parts]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
