"""Puts engines to sleep, and reports the memory that leaves each worker's process, and the time that waking takes.

The shapes are one worker, two tensor-parallel workers, and two data-parallel ranks. Each engine first fills its KV
cache. Then it sleeps at level 1, which gives up the cache, and at level 2, which gives up the weights, too. Tokens of
greedy and seeded requests are compared before and after each sleep. Beside the time of `wake_up()` is that of the start
of the same engine, on a Ray that is running already.

    python benchmarks/sleep.py                                       the bundled model, 128 MiB of cache per worker
    python benchmarks/sleep.py --model CHECKPOINT --cache-mib 512    weights that matter at level 2

The memory is the resident set size, of which shared memory is given separately. What should go is the size of the
cache's blocks, and at level 2 of all tensors of the model. The exit status is 1 if at some worker less than 90 % of it
goes, or if tokens differ.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import ray
from common import table

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path

SHAPES: dict[str, dict[str, int]] = {
    "one worker": {},
    "TP 2": {"tensor_parallel_size": 2},
    "DP 2": {"data_parallel_size": 2},
}
HEADER: list[object] = [
    *("shape", "level", "worker", "MiB full", "asleep", "awake", "of it shared", "should go", "share gone"),
    *("tokens", "wake s", "cold start s"),
]
MAX_MODEL_LEN = 1024
LEAST_SHARE = 0.9
_FIRST_ID = 3
_MIB = 1 << 20


class Owner(NamedTuple):
    """What a worker owns."""

    pid: int
    num_cache_bytes: int
    num_weight_bytes: int

    def to_go(self, level: int) -> int:
        """The number of bytes that a sleep has to give up."""
        return self.num_cache_bytes + (self.num_weight_bytes if level == 2 else 0)


class Resident(NamedTuple):
    """The resident memory of a process, in bytes."""

    num_bytes: int
    num_shared: int


class Sleep(NamedTuple):
    """A sleep. The lists have an entry for each worker."""

    to_go: list[int]
    """The number of bytes that had to go."""
    full: list[Resident]
    asleep: list[Resident]
    awake: list[Resident]
    is_same: bool
    """Whether tokens were the same before and after."""
    wake_s: float

    def shares(self) -> list[float]:
        """The share that has gone of what had to go."""
        return [
            (full.num_bytes - asleep.num_bytes) / to_go
            for full, asleep, to_go in zip(self.full, self.asleep, self.to_go, strict=True)
        ]

    def rows(self) -> list[list[object]]:
        """A row of the table for each worker."""
        verdict = "equal" if self.is_same else "DIFFER"
        return [
            [
                number,
                *(mib(size.num_bytes) for size in sizes),
                "/".join(mib(size.num_shared) for size in sizes),
                mib(to_go),
                f"{share:.2f}",
                verdict,
                f"{self.wake_s:.2f}",
            ]
            for number, (to_go, share, *sizes) in enumerate(
                zip(self.to_go, self.shares(), self.full, self.asleep, self.awake, strict=True)
            )
        ]


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo_model_path()))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cache-mib", type=int, default=128, help="size of each worker's KV cache, in MiB")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    args = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    rows: list[list[object]] = [HEADER]
    is_good = True
    for shape in args.shapes:
        started_s = time.monotonic()
        with start(args, SHAPES[shape]) as llm:
            cold_start_s = time.monotonic() - started_s
            expected = tokens(llm)
            for level in (1, 2):
                slept = sleep(llm, level, expected)
                rows += [[shape, level, *row, f"{cold_start_s:.2f}"] for row in slept.rows()]
                is_good &= slept.is_same and min(slept.shares()) >= LEAST_SHARE
    print(f"{args.model}, {args.dtype}")
    print(table(rows))
    ray.shutdown()
    sys.exit(not is_good)


def start(args: argparse.Namespace, shape: dict[str, int]) -> LLM:
    """Start an engine whose tokens don't depend on what is in the cache."""
    return LLM(
        args.model,
        dtype=args.dtype,
        num_threads=1,
        kv_cache_memory_bytes=args.cache_mib * _MIB,
        max_model_len=MAX_MODEL_LEN,
        batch_invariant=True,
        standby_delay_s=None,
        use_tqdm_on_load=False,
        **shape,  # pyright: ignore[reportArgumentType]
    )


def sleep(llm: LLM, level: int, expected: list[list[int]]) -> Sleep:
    """Fill the cache, let the engine sleep, and wake it up. `expected`: what `tokens` returned before."""
    owners = find_owners(llm)
    fill_cache(llm)
    full = [resident(owner.pid) for owner in owners]
    llm.sleep(level)
    asleep = [resident(owner.pid) for owner in owners]
    started_s = time.monotonic()
    llm.wake_up()
    wake_s = time.monotonic() - started_s
    is_same = tokens(llm) == expected
    awake = [resident(owner.pid) for owner in owners]
    return Sleep([owner.to_go(level) for owner in owners], full, asleep, awake, is_same, wake_s)


def tokens(llm: LLM) -> list[list[int]]:
    """The tokens of greedy and of seeded requests."""
    params = [SamplingParams(temperature=seed % 2, seed=seed, max_tokens=32, ignore_eos=True) for seed in range(8)]
    prompts = [{"prompt_token_ids": list(range(_FIRST_ID, _FIRST_ID + 10 * (1 + seed)))} for seed in range(8)]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def fill_cache(llm: LLM) -> None:
    """Use every block of every rank's cache."""
    rnd = random.Random(0)
    vocab_size = llm.config.model.spec.vocab_size
    size = MAX_MODEL_LEN - 1
    num_prompts = sum(info.num_kv_tokens for info in llm.engine_infos) * 5 // 4 // size + 1
    prompts = [{"prompt_token_ids": rnd.choices(range(_FIRST_ID, vocab_size), k=size)} for _ in range(num_prompts)]
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)


def find_owners(llm: LLM) -> list[Owner]:
    """What each worker owns, in the order of ranks."""

    # a nested function, which is pickled by value: workers can't import this module
    def sizes(worker: Any) -> tuple[int, int, int]:
        import os

        from raycore.weights.offload import tensors_of

        storages = [
            tensor.untyped_storage() for tensor in tensors_of(worker._core.model.network, worker._core.setup.device)
        ]
        num_weight_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        return os.getpid(), worker._core.sizes.block, num_weight_bytes

    num_blocks = llm.engine_infos[0].num_blocks
    return [Owner(pid, size * num_blocks, weights) for pid, size, weights in llm.collective_rpc(sizes)]


def resident(pid: int) -> Resident:
    """The resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    num_bytes, num_shared = (int(values[name].split()[0]) << 10 for name in ("VmRSS", "RssShmem"))
    return Resident(num_bytes, num_shared)


def mib(num_bytes: int) -> str:
    """`num_bytes` in MiB."""
    return f"{num_bytes / _MIB:.0f}"


if __name__ == "__main__":
    main()
