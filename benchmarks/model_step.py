"""The time of a model step, and its ratio to the time of the step's linear layers alone.

Prints a table for each checkpoint: a decode step with 1, 16 and 64 sequences that have 190 tokens each, and a step that
computes a prompt of 2,048 tokens. The worker runs in this process, without Ray and without an engine around it. The
linear layers have random weights of the same shapes and dtype, and random inputs. They are timed as they are and packed
by oneDNN, and the faster of the two counts. Steps and linear layers alternate, so that both see the same machine; the
times are medians.

    python benchmarks/model_step.py CHECKPOINT [CHECKPOINT ...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

# isort: off
import raycore.worker.openmp  # noqa: F401  # before torch: sets the environment of its OpenMP

# isort: on
import numpy as np
import torch
from common import median, table
from torch import Tensor

from raycore.cache_layout import KVCacheConfig
from raycore.config import resolve
from raycore.messages import NewRequest, StepPlan
from raycore.models.spec import ModelSpec
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import WorkerRank
from raycore.worker.worker import Worker

CONTEXT = 190
DECODES = [1, 16, 64]
PROMPT = 2048


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=None, help="default: all cores")
    parser.add_argument("--timings", type=int, default=40, help="of a decode step; a prompt has an eighth")
    args = parser.parse_args()
    for checkpoint in args.checkpoints:
        _measure(checkpoint, args)


def _measure(checkpoint: str, args: argparse.Namespace) -> None:
    worker = _make_worker(checkpoint, args)
    dtype = getattr(torch, worker.dtype_name())
    linears = [_Linears(worker.config.model.spec, dtype, packed=packed) for packed in (True, False)]
    rows: list[list[object]] = [["step", "step ms", "linear layers ms", "ratio", "linear layers GB/s"]]
    for num_seqs in DECODES:
        steps = _Decodes(worker, num_seqs, _blocks_each(worker, args))
        rows.append([f"decode {num_seqs} x {CONTEXT}", *_compare(steps, linears, num_seqs, args.timings)])
        steps.end()
    prompt = partial(_compute_prompt, worker)
    rows.append([f"prompt of {PROMPT}", *_compare(prompt, linears, PROMPT, args.timings // 8)])
    threads = torch.get_num_threads()
    print(f"\n{Path(checkpoint).name}, {worker.dtype_name()}, {threads} threads")
    print(table(rows), flush=True)
    worker.shutdown()


def _compare(step: Callable[[], None], linears: Sequence[_Linears], num_rows: int, num_timings: int) -> list[str]:
    step_s: list[float] = []
    linears_s: list[list[float]] = [[] for _ in linears]
    for each in linears:
        each.prepare(num_rows)
    for index in range(num_timings + 2):
        times = [_seconds(step), *(_seconds(partial(each, num_rows)) for each in linears)]
        if index >= 2:  # the first ones warm up
            for column, value in zip([step_s, *linears_s], times, strict=True):
                column.append(value)
    own, floor = median(step_s), min(map(median, linears_s))
    return [f"{own * 1e3:.2f}", f"{floor * 1e3:.2f}", f"{own / floor:.2f}", f"{linears[0].num_bytes / floor / 1e9:.1f}"]


def _seconds(function: Callable[[], None]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


class _Linears:
    """The linear layers of a model, one after the other, with random weights."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, *, packed: bool) -> None:
        assert spec.moe is None, "models with experts have no fixed linear layers"
        self._packed = packed
        dim, inner, num_heads = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
        fused = num_heads + 2 * spec.num_kv_heads * spec.head_dim
        shapes = [(fused, dim), (dim, num_heads), (2 * inner, dim), (dim, inner)] * spec.num_layers
        self._dtype = dtype
        self._sizes = {dim, num_heads, inner}
        self._inputs: dict[int, dict[int, Tensor]] = {}  # by the number of rows, then of inputs
        self._layers = [(self._weight(*shape), shape[1]) for shape in shapes]
        self._head = (self._weight(spec.vocab_size, dim), dim)
        num_weights = sum(o * i for o, i in shapes) + spec.vocab_size * dim
        self.num_bytes = num_weights * dtype.itemsize

    def prepare(self, num_rows: int) -> None:
        """Make inputs for `num_rows` rows, which is not timed."""
        self._inputs[num_rows] = {size: torch.randn(num_rows, size, dtype=self._dtype) for size in self._sizes}

    @torch.inference_mode()
    def __call__(self, num_rows: int) -> None:
        inputs = self._inputs[num_rows]
        for weight, size in self._layers:
            self._apply(inputs[size], weight)
        weight, size = self._head
        self._apply(inputs[size][:64], weight)

    def _weight(self, num_outputs: int, num_inputs: int) -> Tensor:
        weight = torch.randn(num_outputs, num_inputs, dtype=self._dtype)
        return torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight.t()

    def _apply(self, x: Tensor, weight: Tensor) -> None:
        if self._packed:
            torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
        else:
            torch.mm(x, weight)


class _Decodes:
    """Decode steps of some sequences. The sequences grow by a token with each step."""

    def __init__(self, worker: Worker, num_seqs: int, blocks_each: int) -> None:
        self._worker = worker
        self._slots = list(range(num_seqs))
        requests = [
            _request(slot, CONTEXT, range(slot * blocks_each, (slot + 1) * blocks_each)) for slot in self._slots
        ]
        worker.execute_model(StepPlan(0, _int32(self._slots), _int32([CONTEXT] * num_seqs), new_requests=requests))

    def __call__(self) -> None:
        self._worker.execute_model(StepPlan(1, _int32(self._slots)))

    def end(self) -> None:
        self._worker.execute_model(StepPlan(2, freed_slots=self._slots))


def _compute_prompt(worker: Worker) -> None:
    request = _request(0, PROMPT, range(PROMPT // worker.config.cache.block_size))
    worker.execute_model(StepPlan(0, _int32([0]), _int32([PROMPT]), new_requests=[request]))
    worker.execute_model(StepPlan(1, freed_slots=[0]))


def _make_worker(checkpoint: str, args: argparse.Namespace) -> Worker:
    config = resolve(
        checkpoint,
        dtype=args.dtype,
        num_threads=args.threads,
        max_model_len=max(PROMPT, CONTEXT + args.timings) + 16,
        max_num_batched_tokens=max(DECODES) * CONTEXT,
        device="cpu",
    )
    worker = Worker(config, WorkerRank(dp_rank=0, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=1))
    worker.init_device()
    worker.load_model()
    num_blocks = max(max(DECODES) * _blocks_each(worker, args), PROMPT // config.cache.block_size)
    worker.initialize_cache(KVCacheConfig(num_blocks, worker._sizes.layout))
    worker.warm_up()
    return worker


def _blocks_each(worker: Worker, args: argparse.Namespace) -> int:
    """Return the number of blocks that a sequence needs until the end of its decode steps."""
    return (CONTEXT + args.timings + 2) // worker.config.cache.block_size + 1


def _request(slot: int, num_tokens: int, blocks: range) -> NewRequest:
    token_ids = np.random.default_rng(slot).integers(3, 8000, num_tokens)
    params = SamplingParams(temperature=0)
    return NewRequest(slot, _int32(token_ids), num_tokens, 0, _int32(blocks), params, seed=slot)


def _int32(values: Sequence[int] | range | np.ndarray) -> bytes:
    return np.asarray(values, np.int32).tobytes()


if __name__ == "__main__":
    main()
