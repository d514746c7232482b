"""The host's work for a step on a GPU: its time, and the kernels that it launches. Needs no GPU.

    python benchmarks/host_time.py

The time is that of a step of the engine, with two steps in flight, from planning to its outputs. The decoder is
replaced by a function that does nothing, and everything else is what runs with a GPU, except that copies to the device
go to other memory of this machine. A second table has a device that takes 5 ms for each step, and how much longer steps
take, with and without asynchronous scheduling, and with drafts from n-grams, all of which are right. The launches are
those of a layer of a dense model with norms of queries and keys, and those of a greedy step outside the layers, counted
while Triton interprets the kernels. The last tables are those of `prompt_host_time.py`: the time of launching a
prompt's step, operation by operation.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import msgspec
import torch
from common import table
from torch.utils._python_dispatch import TorchDispatchMode

from raycore.attention.kv_tensors import KVTensors
from raycore.attention.paged import TritonAttention
from raycore.attention.spec import AttentionSpec, MixerConstants
from raycore.config import EngineConfig, resolve
from raycore.decoder.decoder import Decoder
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.layers.gpu_operations import GpuOperations
from raycore.messages import EngineRequest, NewRequest, StepPlan
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.drafts.worker import Drafted, DraftWorker, GuessingWorker
from raycore.runner.compute_threads import ONE_THREAD
from raycore.runner.decode_graphs import DecodeGraphs, decode_sizes
from raycore.runner.execution import GraphedSteps
from raycore.runner.launched_step import LaunchedStep
from raycore.runner.runner import ModelRunner
from raycore.runner.sampling_head import SamplingHead
from raycore.runner.sources import Tokens
from raycore.sampling.gpu import GpuSampling
from raycore.sampling.sampler import Sampler
from raycore.sampling_params import SamplingParams
from raycore.step.batch import SlotBatch, StepInputs
from raycore.step.device_batch import DeviceBatch, StepTensors
from raycore.weights.loader import random_decoder_weights
from raycore.weights.share import WeightShare
from raycore.worker.rank import RankIdentity
from raycore.worker.worker import Worker

CPU = torch.device("cpu")
SIZES = (1, 16, 64, 256)
NUM_STEPS = 300
NUM_SKIPPED = 50
"""Steps at the beginning that are not counted."""
DEVICE_S = 0.005
"""How long the device of the second table takes for a step."""
NUM_DRAFTS = 3
SPECULATION = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS}
NUM_BUSY_STEPS, NUM_BUSY_SKIPPED = 70, 20
"""As above, in the second table."""
MAX_MODEL_LEN = 512
BLOCK_SIZE = 16
DESCRIPTION: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_MODEL_LEN,
    "eos_token_id": 1,
}
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=NUM_STEPS + 20)
DRAWN = msgspec.structs.replace(GREEDY, temperature=0.8, top_p=0.9, top_k=40)


class IdleDecoder:
    """Stands in for a decoder, and returns what it was given."""

    def __init__(self, config: EngineConfig) -> None:
        spec, num_rows = config.model.spec, config.scheduler.max_num_seqs * (1 + NUM_DRAFTS)
        self.vocab_size = spec.vocab_size
        self.num_weights = self.num_key_value_numbers = 1
        self._hidden_RD = torch.zeros(num_rows, spec.hidden_size)
        self._logits_RV = torch.zeros(num_rows, spec.vocab_size)

    def forward(
        self, token_ids_T: torch.Tensor, attention: object, kept: torch.Tensor | None, *_: object
    ) -> torch.Tensor:
        return self._hidden_RD[: len(token_ids_T if kept is None else kept)]

    @property
    def vocabulary(self) -> IdleDecoder:
        return self

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return self._logits_RV[: len(hidden_RD)]


class IdleSampling(GpuSampling):
    """Launches no kernel, as far as steps are concerned."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(CPU)
        self._token_ids_R = torch.full((num_rows,), 5)

    def mask(self, logits_RV: torch.Tensor, rows_M: Any, masks_MB: Any) -> None:
        pass

    def most_likely(self, logits_RV: torch.Tensor) -> torch.Tensor:
        return self._token_ids_R[: len(logits_RV)]

    def draw(self, logits_RV: torch.Tensor, limits: Any) -> torch.Tensor:
        return self._token_ids_R[: len(logits_RV)]


class BusyDevice:
    """Stands in for the events of a device that takes `step_s` seconds for each step, one after the other."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._ends_s = 0.0

    def launch(self) -> StepEnd:
        self._ends_s = max(self._ends_s, time.perf_counter()) + self._step_s
        return StepEnd(self._ends_s)


@dataclass(frozen=True)
class StepEnd:
    """The event that a step ends with."""

    at_s: float

    def query(self) -> bool:
        return time.perf_counter() >= self.at_s


class BusyHead(SamplingHead):
    """Its tokens arrive when the device has computed the step."""

    def __init__(self, device: BusyDevice, *head: Any) -> None:
        """`head`: the arguments of `SamplingHead`."""
        super().__init__(*head)
        self._device = device

    def sample(self, step: StepInputs, tensors: StepTensors, launched: LaunchedStep, grammar: Any) -> None:
        super().sample(step, tensors, launched, grammar)
        event: Any = self._device.launch()
        assert launched.token_ids is not None, "all requests decode"
        launched.token_ids._event = event


def become_idle(worker: Worker, device_s: float) -> None:
    """Give a worker a runner as a GPU's, with a decoder that does nothing. `device_s`: how long a step takes."""
    config = worker.config
    spec, num_seqs = config.model.spec, config.scheduler.max_num_seqs
    attention_spec = AttentionSpec.of(
        spec, 1, [MixerConstants()] * spec.num_layers, MAX_MODEL_LEN + 1, torch.float32, CPU
    )
    kv = KVTensors(spec.num_layers, 1, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim, torch.float32, CPU)
    sizes = decode_sizes(num_seqs)
    batch = DeviceBatch(SlotBatch(num_seqs, MAX_MODEL_LEN, BLOCK_SIZE), CPU, decode_sizes=sizes, is_shared=False)
    kernels = IdleSampling(num_seqs * (1 + NUM_DRAFTS))
    decoder: Any = IdleDecoder(config)
    sampler = Sampler(spec.vocab_size, kernels)
    of_head = decoder, batch, sampler
    head = BusyHead(BusyDevice(device_s), *of_head) if device_s else SamplingHead(*of_head)
    drafted = Drafted(decoder, batch, sampler, ONE_THREAD, num_blocks=0, max_rows=sizes[-1])
    drafting: Any = GuessingWorker(config.speculative_config) if config.workers_draft else DraftWorker()
    worker._core.runner = ModelRunner(
        decoder,
        TritonAttention(attention_spec, kv, sizes[-1]),
        batch,
        Tokens(batch),
        head,
        drafting.make_drafter(drafted),
        execution=GraphedSteps(DecodeGraphs(lambda compute: compute)),
    )


def step_time_us(
    path: str,
    num_requests: int,
    params: SamplingParams,
    device_s: float = 0.0,
    *,
    is_async: bool = True,
    speculation: dict[str, Any] | None = None,
) -> float:
    """The median time of an engine's step. `device_s`: how long the device takes for each."""
    num_steps, num_skipped = (NUM_BUSY_STEPS, NUM_BUSY_SKIPPED) if device_s else (NUM_STEPS, NUM_SKIPPED)
    config = resolve(
        path,
        load_format="dummy",
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(2048, 32 * num_requests),
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks_override=num_requests * MAX_MODEL_LEN // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        async_scheduling=is_async,
        speculative_config=speculation,
        num_threads=1,
    )
    core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
    core.executor.collective_rpc(become_idle, args=(device_s,))
    for i in range(num_requests):
        prompt = [(i * 7 + j) % 8000 for j in range(32)]
        core.submit(EngineRequest(i, str(i), prompt, params, seed=i))
    samples: list[float] = []
    for _ in range(num_steps):
        start = time.perf_counter()
        core.step()
        samples.append(time.perf_counter() - start)
    core.shutdown()
    return 1e6 * statistics.median(samples[num_skipped:])


class LaunchCount(TorchDispatchMode):
    """Counts the operations of torch that launch a kernel. Triton's are counted by `counting_launches`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(("empty", "new_empty", "detach", "lift")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting_launches() -> Iterator[list[str]]:
    """Yield a list that grows by the name of each kernel that is launched."""
    from triton.runtime.interpreter import GridExecutor

    count, launch = LaunchCount(), GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        count.names.append(f"triton {self.fn.__name__}")
        num_before = len(count.names)
        result = launch(self, *args, **kwargs)
        del count.names[num_before:]  # what the interpreter does with tensors
        return result

    GridExecutor.__call__ = counted
    try:
        with count:
            yield count.names
    finally:
        GridExecutor.__call__ = launch


def count_launches(path: str) -> tuple[list[str], int]:
    """Return the kernels of a layer in a step of greedy decodes, and how many others the step has."""
    spec = resolve(path, load_format="dummy").model.spec
    names: dict[int, list[str]] = {}
    for num_layers in (1, 2):
        own = msgspec.structs.replace(spec, num_layers=num_layers, layer_windows=[None] * num_layers)
        runner = make_runner(own)
        block = bytes(4)
        requests = [NewRequest(0, bytes(8), 2, 0, block, GREEDY, 0)]
        slot = bytes(4)
        runner.execute(StepPlan(0, slot, b"\x02\0\0\0", new_requests=requests))
        runner.execute(StepPlan(1, slot))
        with counting_launches() as names[num_layers]:
            runner.launch(StepPlan(2, slot))
    num_of_layer = len(names[2]) - len(names[1])
    first = next(i for i, name in enumerate(names[2]) if name.startswith("triton"))
    return names[2][first : first + num_of_layer], len(names[1]) - num_of_layer


def make_runner(spec: Any) -> ModelRunner:
    """A GPU's runner of a model with random weights, whose kernels Triton interprets."""
    operations = GpuOperations(CPU)
    decoder = Decoder(spec, random_decoder_weights(WeightShare(spec, torch.float32), 0), TensorParallel(), operations)
    attention_spec = AttentionSpec.of(spec, 1, decoder.constants, MAX_MODEL_LEN + 1, torch.float32, CPU)
    kv = KVTensors(spec.num_layers, 1, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim, torch.float32, CPU)
    batch = DeviceBatch(SlotBatch(1, MAX_MODEL_LEN, BLOCK_SIZE), CPU, decode_sizes=[1], is_shared=False)
    sampler = Sampler(spec.vocab_size, GpuSampling(CPU))
    graphs = GraphedSteps(DecodeGraphs(lambda compute: compute))
    head = SamplingHead(decoder, batch, sampler)
    return ModelRunner(decoder, TritonAttention(attention_spec, kv, 1), batch, Tokens(batch), head, execution=graphs)


def unhidden_us(path: str, num_requests: int) -> list[float]:
    """How much longer steps are than the device takes: plain and asynchronous ones, without drafts and with."""
    return [
        step_time_us(path, num_requests, GREEDY, DEVICE_S, is_async=is_async, speculation=speculation) - 1e6 * DEVICE_S
        for speculation in (None, SPECULATION)
        for is_async in (False, True)
    ]


def main(write: Callable[[str], object] = print) -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(msgspec.json.encode(DESCRIPTION).decode())
        rows = [
            [str(size), *(f"{step_time_us(directory, size, params):.0f}" for params in (GREEDY, DRAWN))]
            for size in SIZES
        ]
        unhidden = [[str(size), *(f"{us:.0f}" for us in unhidden_us(directory, size))] for size in SIZES]
        of_layer, num_others = count_launches(directory)
    write(table([["running", "greedy step, µs", "step with top-k and top-p, µs"], *rows]))
    kinds = (f"{kind}, µs" for kind in ("one at a time", "asynchronous", "with drafts", "with drafts, asynchronous"))
    write("\n" + table([["running", *kinds], *unhidden]))
    write(f"\n{len(of_layer)} kernels in a layer: {', '.join(of_layer)}\n{num_others} kernels in a step outside layers")
    # in a process of its own, in which Triton compiles kernels
    program, environment = Path(__file__).with_name("prompt_host_time.py"), {**os.environ, "TRITON_INTERPRET": "0"}
    prompts = subprocess.run([sys.executable, program], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    write("\n" + prompts.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
