"""The scheduler's time per step of steady decode, compared with vLLM's scheduler. The two are measured alternately.

    python benchmarks/scheduler_step.py --peer-python ENV/bin/python --checkpoint DIR

Every request has 32 prompt tokens and decodes one plan at a time, with blocks of 16 tokens and prefix caching. A step's
time is schedule() plus update(), without the model and without building its result. The table has, for each number of
requests, the medians over rounds of the median and the mean step. The mean includes the steps in which all requests
start a new block at once. Without --peer-python, only raycore is measured.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np

from raycore.config import CacheConfig, SchedulerConfig
from raycore.messages import EngineRequest, StepResult
from raycore.sampling_params import SamplingParams
from raycore.scheduler.prefixes import Prefixes
from raycore.scheduler.scheduler import Scheduler

SIZES = (1, 64, 256, 1024)
NUM_STEPS = 160
NUM_SKIPPED = 10
"""Steps at the beginning that are not counted."""
PEER_TIMEOUT_S = 180.0
VOCAB_SIZE = 8192
Timing = tuple[float, float]
"""(median, mean) of a step, in µs."""


def measure(num_requests: int) -> Timing:
    """One round of raycore's scheduler."""
    scheduler = Scheduler(
        SchedulerConfig(max(num_requests, 2), 65536, 2048),
        CacheConfig(16, True, 0.9),
        20000,
        VOCAB_SIZE,
        parts=[Prefixes()],
    )
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for i in range(num_requests):
        prompt = [(i * 7 + j) % 8000 for j in range(32)]
        scheduler.submit(EngineRequest(seq_id=i, request_id=str(i), prompt_token_ids=prompt, params=params, seed=i))
    tokens = np.full(num_requests, 5, np.int32).tobytes()
    samples: list[float] = []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        assert plan is not None
        result = StepResult(plan.step, tokens)
        resumed = time.perf_counter()
        scheduler.update(plan, result)
        samples.append(time.perf_counter() - resumed + scheduled - start)
    steady = samples[NUM_SKIPPED:]
    return statistics.median(steady) * 1e6, statistics.fmean(steady) * 1e6


def plan_bytes(num_requests: int) -> int:
    """Encoded bytes of a plan in which every request decodes one token and none starts a block."""
    scheduler = Scheduler(SchedulerConfig(num_requests, 65536, 2048), CacheConfig(16, True, 0.9), 20000, VOCAB_SIZE)
    for i in range(num_requests):
        scheduler.submit(EngineRequest(i, str(i), [i] * 20, SamplingParams(max_tokens=9), seed=i))
    scheduler.schedule()
    return len(msgspec.msgpack.encode(scheduler.schedule()))


@contextmanager
def running_peer(python: str, checkpoint: str) -> Iterator[Connection]:
    """A connection to `scheduler_step_peer.py` in its own environment: send a size, receive a `Timing`."""
    ours, theirs = socket.socketpair()
    script = Path(__file__).with_name("scheduler_step_peer.py")
    command = [python, str(script), str(theirs.fileno()), checkpoint, str(NUM_STEPS), str(NUM_SKIPPED)]
    with theirs:
        process = subprocess.Popen(command, stdout=sys.stderr, pass_fds=[theirs.fileno()])
    try:
        with Connection(ours.detach()) as connection:
            yield connection
    finally:
        process.kill()
        process.wait()


def ask(peer: Connection, size: int) -> Timing:
    """One round of vLLM's scheduler."""
    peer.send(size)
    if not peer.poll(PEER_TIMEOUT_S):
        raise SystemExit(f"the peer did not measure {size} requests within {PEER_TIMEOUT_S:.0f} s")
    return peer.recv()


def middle(rounds: list[Timing]) -> Timing:
    """The median over rounds of the medians, and of the means."""
    medians, means = zip(*rounds, strict=True)
    return statistics.median(medians), statistics.median(means)


def compare(sizes: list[int], num_rounds: int, peer: Connection | None) -> None:
    """Measure and print the table."""
    columns = (
        ("running", 8),
        ("ours µs", 10),
        ("mean", 8),
        ("vLLM µs", 10),
        ("mean", 8),
        ("ratio", 8),
        ("of means", 10),
    )
    print("".join(f"{name:>{width}}" for name, width in columns) + f"{'plan bytes':>12}")
    for size in sizes:
        ours: list[Timing] = []
        theirs: list[Timing] = []
        for _ in range(num_rounds):
            ours.append(measure(size))
            if peer is not None:
                theirs.append(ask(peer, size))
        median, mean = middle(ours)
        row = f"{size:>8}{median:>10.1f}{mean:>8.1f}"
        if theirs:
            peer_median, peer_mean = middle(theirs)
            row += f"{peer_median:>10.1f}{peer_mean:>8.1f}{median / peer_median:>8.3f}{mean / peer_mean:>10.3f}"
        else:
            row += f"{'-':>10}{'-':>8}{'-':>8}{'-':>10}"
        print(f"{row}{plan_bytes(size):>12}", flush=True)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="the interpreter of an environment that has vLLM")
    parser.add_argument("--checkpoint", help="a checkpoint for vLLM's ModelConfig; its weights are not read")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.peer_python is None:
        print("vLLM is not measured: that needs --peer-python and --checkpoint")
        compare(args.sizes, args.rounds, None)
        return
    if args.checkpoint is None:
        parser.error("--peer-python needs --checkpoint")
    with running_peer(args.peer_python, args.checkpoint) as peer:
        compare(args.sizes, args.rounds, peer)


if __name__ == "__main__":
    main()
