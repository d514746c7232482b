"""The engine's own time: what a decoding step takes in an engine more than in `model_step.py`.

Two things alternate: 1, 16 or 64 requests of an `LLM`, and in a process of its own, the same steps without Ray and an
engine around them. Contexts are the same. The engine's own time is the difference. It has two parts: what passes
between two steps of the worker (planning, results, outputs), and what the worker's steps take longer, because other
threads and processes run beside them. Times are medians of the rounds' means.

`--profile` prints the functions in which the thread that runs steps spends its time, without what they call, by
Python's own profiler, which makes short functions look longer than they are. A kernel is a function here, too.

    python benchmarks/engine_time.py CHECKPOINT
    python benchmarks/engine_time.py --profile 40 CHECKPOINT
"""

from __future__ import annotations

import argparse
import multiprocessing
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from common import median, table

from raycore import LLM, SamplingParams
from raycore.inputs import TokensPrompt
from raycore.node.versions import hardware

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

CONTEXT = 190
"""As in `model_step.py`."""
REQUESTS = [1, 16, 64]
NUM_WARM_UP = 5
"""Steps at the beginning of each round that aren't counted."""
BLOCK_SIZE = 16


class Times(NamedTuple):
    """Of a step, in seconds. Of a round: the means of its steps."""

    step_s: float
    """From its beginning to that of the next one."""
    in_worker_s: float
    of_thread_s: float
    """CPU time of the thread that runs steps."""


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    parser.add_argument("--threads", type=int, default=None, help="default: all cores")
    parser.add_argument("--profile", type=int, default=0, metavar="FUNCTIONS", help="print so many functions")
    args = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    own_end, other_end = processes.Pipe()
    processes.Process(target=run_alone, args=(other_end, args), daemon=True).start()
    llm = LLM(
        args.checkpoint,
        num_threads=args.threads,
        block_size=BLOCK_SIZE,
        max_model_len=CONTEXT + args.steps + 16,
        max_num_seqs=max(args.requests),
        max_num_batched_tokens=max(args.requests) * CONTEXT,
        num_gpu_blocks_override=max(args.requests) * (-(-(CONTEXT + args.steps + 2) // BLOCK_SIZE) + 1),
        enable_prefix_caching=False,
    )
    llm.collective_rpc(note_steps)
    rows: list[list[object]] = [
        ["requests", "engine", "model_step", "own time", "between steps", "in the worker", "of the thread"]
    ]
    for num_requests in args.requests:
        engine, alone = measure(llm, own_end, num_requests, args)
        own = Times(*(here - there for here, there in zip(engine, alone, strict=True)))
        between_s = own.step_s - own.in_worker_s
        seconds = [engine.step_s, alone.step_s, own.step_s, between_s, own.in_worker_s, own.of_thread_s]
        rows.append([num_requests, *(f"{each * 1e3:.3f}" for each in seconds)])
    print(f"{args.checkpoint}: milliseconds of a decoding step; {hardware()}")
    print(table(rows), flush=True)
    for num_requests in args.requests if args.profile else []:
        print(f"\n{num_requests} requests: microseconds of a step in each function, and its calls in a step")
        print(profile(llm, num_requests, args), flush=True)
    own_end.close()
    llm.shutdown()


def measure(llm: LLM, worker: Connection, num_requests: int, args: argparse.Namespace) -> tuple[Times, Times]:
    """Return the medians of the rounds: in the engine, and of the worker alone."""
    engine: list[Times] = []
    alone: list[Times] = []
    for number in range(args.rounds + 1):
        generate(llm, num_requests, args.steps)
        in_engine = means(llm.collective_rpc(take_steps, args=(num_requests,))[0])
        worker.send(num_requests)
        of_worker = means(worker.recv())
        if number:  # the first round warms up
            engine.append(in_engine)
            alone.append(of_worker)
    return of_rounds(engine), of_rounds(alone)


def of_rounds(rounds: list[Times]) -> Times:
    """Return the medians."""
    return Times(*map(median, zip(*rounds, strict=True)))


def means(steps: list[tuple[float, float, float]]) -> Times:
    """Return the means of the steps after the first ones: of when each begins and ends, and the thread's time then."""
    steps = steps[NUM_WARM_UP:]
    num_steps = len(steps) - 1
    return Times(
        (steps[-1][0] - steps[0][0]) / num_steps,
        sum(ended_s - begun_s for begun_s, ended_s, _ in steps[:-1]) / num_steps,
        (steps[-1][2] - steps[0][2]) / num_steps,
    )


def generate(llm: LLM, num_requests: int, num_steps: int) -> None:
    """Run so many requests at once, each of which takes so many decoding steps."""
    prompts = [
        TokensPrompt(prompt_token_ids=np.random.default_rng(index).integers(3, 8000, CONTEXT).tolist())
        for index in range(num_requests)
    ]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_steps + 1)
    llm.generate(prompts, params, use_tqdm=False)


def profile(llm: LLM, num_requests: int, args: argparse.Namespace) -> str:
    """Return the functions that take the most time of a step in the engine."""
    llm.collective_rpc(begin_profile, args=(num_requests,))
    generate(llm, num_requests, args.steps)
    found = llm.collective_rpc(end_profile, args=(args.profile,))[0]
    llm.collective_rpc(take_steps, args=(num_requests,))
    rows = [[f"{1e6 * own_s / args.steps:.1f}", f"{calls / args.steps:.1f}", name] for own_s, calls, name in found]
    return table([["us", "calls", "function"], *rows])


def run_alone(requests: Connection, args: argparse.Namespace) -> None:
    """In a process of its own: for each number of requests that arrives, run steps, and send what `take_steps` does."""
    # imported lazily: the engine's driver needs no torch
    from time import perf_counter, thread_time

    from model_step import Decodes, blocks_each, make_worker

    options = {"dtype": "auto", "quantization": None, "prompt": 0, "decodes": args.requests, "timings": args.steps}
    settings = argparse.Namespace(**options, threads=args.threads)
    worker = make_worker(args.checkpoint, settings)
    while True:
        try:
            step = Decodes(worker, requests.recv(), blocks_each(worker, settings))
        except EOFError:
            return
        times = []
        for _ in range(args.steps):
            begun_s, thread_s = perf_counter(), thread_time()
            step()
            times.append((begun_s, perf_counter(), thread_s))
        step.end()
        requests.send(times)


# ---- in the rank's process: these are pickled by value, and the thread that runs steps calls them


def note_steps(worker: Any) -> None:
    """Note all steps of the worker from now on."""
    from time import perf_counter, thread_time

    execute_model = worker.execute_model
    worker.noted, worker.profiler, worker.num_profiled = [], None, 0

    def noted(plan: Any) -> Any:
        num_decodes = 0 if plan.num_tokens else len(plan.slots) // 4
        if worker.num_profiled and num_decodes == worker.num_profiled:
            worker.num_profiled = 0
            worker.profiler.enable()
        begun_s, thread_s = perf_counter(), thread_time()
        result = execute_model(plan)
        worker.noted.append((num_decodes, (begun_s, perf_counter(), thread_s)))
        return result

    worker.execute_model = noted


def take_steps(worker: Any, num_requests: int) -> list[tuple[float, float, float]]:
    """Return when each step of so many decodes began and ended, and the thread's CPU time when it began."""
    noted, worker.noted = worker.noted, []
    return [times for num_decodes, times in noted if num_decodes == num_requests]


def begin_profile(worker: Any, num_requests: int) -> None:
    """Profile this thread from the first step of so many decodes on."""
    from cProfile import Profile

    worker.profiler, worker.num_profiled = Profile(), num_requests


def end_profile(worker: Any, num_functions: int) -> list[tuple[float, int, str]]:
    """Return (seconds without what it calls, calls, name) of the functions that took the most."""
    worker.profiler.disable()
    found = []
    for entry in worker.profiler.getstats():
        code = entry.code
        if not isinstance(code, str):
            code = f"{code.co_filename.rpartition('/raycore/')[2].rpartition('site-packages/')[2]}:{code.co_name}"
        found.append((entry.inlinetime, entry.callcount, code))
    return sorted(found, reverse=True)[:num_functions]


if __name__ == "__main__":
    main()
