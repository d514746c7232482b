"""The time of a model step, and its share of what memory can give: the weights' bytes over the measured bandwidth.

Prints a table for each checkpoint, which is a directory or a GGUF file: decode steps with 1 to 64 sequences that have
190 tokens each (`--decodes`), and a step that computes a prompt of 2,048 tokens (`--prompt`). The worker runs in this
process, without Ray and without an engine around it. Times are medians.

A step reads each weight of the layers and of the head once, in the form in which it lies in memory, such as integers
and their scales. The embedding counts only where the head is computed with it, and image towers don't count. Keys and
values aren't counted either, so with many sequences the share is lower than what memory gives. Memory is measured after
each row: the best of five times that all threads read 512 MiB. Weights that fit into the processor's caches are read
faster than that. Prompts are bound by arithmetic instead: GFLOP/s are those of linear layers, two for each weight and
token.

Models with experts have no fixed number of bytes, and are refused.

    python benchmarks/model_step.py CHECKPOINT [CHECKPOINT ...]
    python benchmarks/model_step.py --quantization int8 CHECKPOINT
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
from common import median, read_rate, table

from raycore.cache_layout import KVCacheConfig
from raycore.config import resolve
from raycore.messages import NewRequest, StepPlan
from raycore.node.versions import hardware
from raycore.parts.weights.worker.reads import bytes_of_step
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import WorkerRank
from raycore.worker.worker import Worker

CONTEXT = 190
DECODES = [1, 2, 4, 8, 16, 64]
PROMPT = 2048
NUM_READ = 1 << 27
"""Numbers of 4 bytes: more than the caches of most processors hold."""


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None, help="as the engine's option: int8")
    parser.add_argument("--threads", type=int, default=None, help="default: all cores")
    parser.add_argument("--decodes", type=int, nargs="*", default=DECODES, metavar="SEQUENCES")
    parser.add_argument("--prompt", type=int, default=PROMPT, metavar="TOKENS", help="0: none")
    parser.add_argument("--timings", type=int, default=40, help="of a decode step; a prompt has an eighth")
    args = parser.parse_args()
    for checkpoint in args.checkpoints:
        _measure(checkpoint, args)


def _measure(checkpoint: str, args: argparse.Namespace) -> None:
    worker = make_worker(checkpoint, args)
    num_bytes = _bytes_of_step(worker)
    numbers = torch.ones(NUM_READ)
    rows: list[list[object]] = [["step", "ms", "weights GB/s", "memory GB/s", "share", "tokens/s", "GFLOP/s"]]

    def add(name: str, step: Callable[[], None], num_tokens: int, num_outputs: int, num_timings: int) -> None:
        seconds = _median_s(step, max(1, num_timings))
        torch.set_num_threads(worker._core.setup.max_threads)
        weights, memory = num_bytes / seconds, read_rate(numbers)
        num_products = _products(worker, num_tokens, num_outputs)
        cells = [f"{seconds * 1e3:.2f}", f"{weights / 1e9:.1f}", f"{memory / 1e9:.1f}", f"{weights / memory:.2f}"]
        rows.append([name, *cells, f"{num_tokens / seconds:,.0f}", f"{2 * num_products / seconds / 1e9:,.0f}"])

    for num_seqs in args.decodes:
        steps = Decodes(worker, num_seqs, blocks_each(worker, args))
        add(f"decode {num_seqs} x {CONTEXT}", steps, num_seqs, num_seqs, args.timings)
        steps.end()
    if args.prompt:
        prompt = partial(_compute_prompt, worker, args.prompt)
        add(f"prompt of {args.prompt}", prompt, args.prompt, 1, args.timings // 8)
    setup = worker._core.setup
    print(f"\n{Path(checkpoint).name}, {setup.dtype_name}, {num_bytes / 1e6:.0f} MB of weights a step")
    print(f"{hardware()}, {setup.computation.backend}, {setup.max_threads} threads")
    print(table(rows), flush=True)
    worker.shutdown()


def _bytes_of_step(worker: Worker) -> int:
    """Return how many bytes of weights a step reads. Exits if that depends on the step's tokens."""
    num_bytes = bytes_of_step(worker._core.model.network, worker.config.model.spec)
    if not num_bytes:
        raise SystemExit(f"{worker.config.model.model}: expected one of raycore's families, without experts")
    return num_bytes


def _products(worker: Worker, num_tokens: int, num_outputs: int) -> int:
    """Return the number of multiplications with weights. The head has `num_outputs` rows."""
    decoder = worker._core.model.network
    num_in_head = decoder.vocab_size * decoder.hidden_size
    return (decoder.num_weights - num_in_head) * num_tokens + num_in_head * num_outputs


def _median_s(step: Callable[[], None], num_timings: int) -> float:
    for _ in range(2):
        step()  # warms up
    return median([_seconds(step) for _ in range(num_timings)])


def _seconds(function: Callable[[], None]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


class Decodes:
    """Decode steps of some sequences. The sequences grow by a token with each step."""

    def __init__(self, worker: Worker, num_seqs: int, num_blocks: int) -> None:
        """`num_blocks`: of each sequence."""
        self._worker = worker
        self._slots = list(range(num_seqs))
        blocks = [range(slot * num_blocks, (slot + 1) * num_blocks) for slot in self._slots]
        requests = [_request(slot, CONTEXT, own) for slot, own in zip(self._slots, blocks, strict=True)]
        worker.execute_model(StepPlan(0, _int32(self._slots), _int32([CONTEXT] * num_seqs), new_requests=requests))

    def __call__(self) -> None:
        """Compute a step."""
        self._worker.execute_model(StepPlan(1, _int32(self._slots)))

    def end(self) -> None:
        """Free the sequences."""
        self._worker.execute_model(StepPlan(2, freed_slots=self._slots))


def _compute_prompt(worker: Worker, num_tokens: int) -> None:
    request = _request(0, num_tokens, range(-(-num_tokens // worker.config.cache.block_size)))
    worker.execute_model(StepPlan(0, _int32([0]), _int32([num_tokens]), new_requests=[request]))
    worker.execute_model(StepPlan(1, freed_slots=[0]))


def make_worker(checkpoint: str, args: argparse.Namespace) -> Worker:
    """Return a worker with a cache for the steps that the arguments ask for."""
    config = resolve(
        checkpoint,
        dtype=args.dtype,
        quantization=args.quantization,
        num_threads=args.threads,
        max_model_len=max(args.prompt, CONTEXT + args.timings) + 16,
        max_num_batched_tokens=max(args.prompt, max([1, *args.decodes]) * CONTEXT),
        device="cpu",
    )
    worker = Worker(config, WorkerRank(dp_rank=0, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=1))
    worker.init_device()
    worker.load_model()
    num_of_decodes = max([1, *args.decodes]) * blocks_each(worker, args)
    num_blocks = max(num_of_decodes, -(-args.prompt // config.cache.block_size))
    worker.initialize_cache(KVCacheConfig(num_blocks, worker._core.sizes.layout))
    worker.warm_up()
    return worker


def blocks_each(worker: Worker, args: argparse.Namespace) -> int:
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
