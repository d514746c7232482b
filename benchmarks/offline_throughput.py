"""Output tokens per second of `LLM.generate`: raycore and vLLM's CPU build in alternating runs.

Both engines run twice: as installed, and with all cores. As installed, vLLM leaves a core free. With all cores, raycore
has `num_threads`, and vLLM is bound to the cores and has Intel's OpenMP, as its documentation recommends. vLLM runs
compiled. Shapes are (batch, prompt tokens, new tokens). Prompts are random ids, decoding is greedy, end-of-sequence is
ignored, prefix caching is on. Each run is a new process that warms up, then times every shape `--repeats` times. The
tables have medians over all timings. With `--neighbour`, every run is repeated with a process beside it that computes
all the time, and the last table shows what is left of the speed. *Same* is the share of raycore's outputs that are
equal to vLLM's. In 16 bits, engines round differently, and one different token changes all that follow.

Both engines use `dtype="auto"` unless `--dtype` is given: on a processor without bfloat16 instructions, raycore then
computes in float32 and vLLM in bfloat16, and `--peer-dtype float32` makes vLLM faster.

A checkpoint needs at least 8,000 token ids and positions for 4,096 tokens; the bundled model has fewer of both.

    python benchmarks/offline_throughput.py --peer-python PEER/bin/python CHECKPOINT [CHECKPOINT ...]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import PEER_ENVIRONMENT, Shape, median, parse_shape, peer_on_all_cores, run_child, table, this_python

from raycore.node.resources import usable_cores

SHAPES: list[Shape] = [(1, 32, 128), (16, 128, 128), (64, 128, 64), (1, 3500, 64), (8, 3000, 64)]

ALL_CORES = ", all cores"

COMMON = """
import json, random, sys, time
run = json.loads(sys.argv[1])

def measure(LLM, SamplingParams, **options):
    started = time.time()
    llm = LLM(model=run["checkpoint"], dtype=run["dtype"], tensor_parallel_size=run["tp"], max_model_len=4096,
              max_num_seqs=256, enable_prefix_caching=True, **options)
    started = time.time() - started
    rnd = random.Random(0)
    def prompts(batch, length):
        return [{"prompt_token_ids": [rnd.randrange(3, 8000) for _ in range(length)]} for _ in range(batch)]
    def generate(batch, length, new):
        warm_up = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.generate(prompts(batch, length), warm_up, use_tqdm=False)
        ids = prompts(batch, length)
        begun = time.perf_counter()
        outputs = llm.generate(ids, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True), use_tqdm=False)
        elapsed = time.perf_counter() - begun
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert made == batch * new, (made, batch, new)
        return made / elapsed, [hash(tuple(output.outputs[0].token_ids)) for output in outputs]
    rates, made = {}, {}
    for shape in map(tuple, run["shapes"]):
        timings = [generate(*shape) for _ in range(run["repeats"])]
        rates[str(shape)] = [rate for rate, _ in timings]
        made[str(shape)] = [output for _, outputs in timings for output in outputs]
    print("@result " + json.dumps({"startup": started, "rates": rates, "outputs": made}), flush=True)
    return llm
"""

OURS = (
    COMMON
    + """
from raycore import LLM, SamplingParams
measure(LLM, SamplingParams, num_threads=run["num_threads"]).shutdown()
"""
)

PEER = (
    COMMON
    + """
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    measure(LLM, SamplingParams, disable_log_stats=True)
"""
)


@dataclass(frozen=True)
class Engine:
    """One of the compared engines."""

    name: str
    python: str
    script: str
    dtype: str
    environment: dict[str, str]
    num_threads: int | None = None

    def run(self, checkpoint: str, args: argparse.Namespace) -> dict[str, Any]:
        """Time all shapes in a new process."""
        run = {
            "checkpoint": checkpoint,
            "dtype": self.dtype,
            "tp": args.tensor_parallel_size,
            "repeats": args.repeats,
            "shapes": args.shapes,
            "num_threads": self.num_threads,
        }
        return run_child(self.python, self.script, [json.dumps(run)], self.environment, args.timeout_s)


def main() -> None:
    """Run the benchmark and print the tables of each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    parser.add_argument(
        "--peer-python", metavar="PATH", help="the interpreter that has vLLM; without it only raycore runs"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument(
        "--shapes", nargs="+", type=parse_shape, default=SHAPES, metavar="BATCH,PROMPT,NEW", help=f"default: {SHAPES}"
    )
    parser.add_argument("--only-all-cores", action="store_true", help="don't run engines as installed")
    parser.add_argument("--neighbour", action="store_true", help="also measure beside a process that computes")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--peer-dtype", default=None, help="default: as --dtype")
    parser.add_argument("--runs", type=int, default=2, help="processes per engine")
    parser.add_argument("--repeats", type=int, default=3, help="timings per shape in one process")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for one process")
    args = parser.parse_args()
    for checkpoint in args.checkpoints:
        _compare(checkpoint, args)


def _engines(args: argparse.Namespace) -> list[Engine]:
    threads = usable_cores() // args.tensor_parallel_size
    engines = [
        Engine("raycore", this_python(), OURS, args.dtype, {}),
        Engine(f"raycore{ALL_CORES}", this_python(), OURS, args.dtype, {}, threads),
    ]
    if args.peer_python:
        dtype = args.peer_dtype or args.dtype
        tuning = peer_on_all_cores(args.peer_python, args.tensor_parallel_size)
        engines += [
            Engine("vLLM", args.peer_python, PEER, dtype, PEER_ENVIRONMENT),
            Engine(f"vLLM{ALL_CORES}", args.peer_python, PEER, dtype, PEER_ENVIRONMENT | tuning),
        ]
    return [engine for engine in engines if ALL_CORES in engine.name or not args.only_all_cores]


def _compare(checkpoint: str, args: argparse.Namespace) -> None:
    engines = _engines(args)
    names = [engine.name for engine in engines]
    situations = (False, True) if args.neighbour else (False,)  # beside a neighbour?
    rates: dict[bool, dict[str, dict[str, list[float]]]] = {
        is_beside: {name: defaultdict(list) for name in names} for is_beside in situations
    }
    startups: dict[str, list[float]] = defaultdict(list)
    outputs: dict[str, dict[str, list[int]]] = {name: defaultdict(list) for name in names}
    for _ in range(args.runs):
        for engine in engines:
            for is_beside in situations:
                with _neighbour(is_beside):
                    fields = engine.run(checkpoint, args)
                if not is_beside:
                    startups[engine.name].append(fields["startup"])
                    for shape, made in fields["outputs"].items():
                        outputs[engine.name][shape] += made
                for shape, values in fields["rates"].items():
                    rates[is_beside][engine.name][shape] += values
                print(f"{engine.name}{' beside a neighbour' * is_beside}: {fields['rates']}", file=sys.stderr)
    medians = {
        is_beside: {name: [median(by_shape[str(shape)]) for shape in args.shapes] for name, by_shape in by_name.items()}
        for is_beside, by_name in rates.items()
    }
    print(f"\n{Path(checkpoint).name}, dtype {args.dtype}, vLLM's {args.peer_dtype or args.dtype}", end="")
    print(f", TP {args.tensor_parallel_size}: medians of {args.runs} processes x {args.repeats} timings")
    for is_beside, by_name in medians.items():
        print(f"\noutput tokens per second{', beside a busy process' * is_beside}")
        print(_comparison(by_name, outputs, args.shapes))
    if args.neighbour:
        print("\nspeed beside a busy process / alone")
        print(_shares_kept(medians[False], medians[True], args.shapes))
    print("\nstartup s:", ", ".join(f"{name} {median(startups[name]):.1f}" for name in names), flush=True)


def _comparison(
    medians: dict[str, list[float]], outputs: dict[str, dict[str, list[int]]], shapes: Sequence[Shape]
) -> str:
    """Return a table of the rates, of raycore's rates over vLLM's, and of the share of equal outputs."""
    pairs = [("raycore" + cores, "vLLM" + cores) for cores in ("", ALL_CORES)]
    pairs = [pair for pair in pairs if pair[1] in medians]
    ratios = [[ours / peer for ours, peer in zip(*(medians[n] for n in pair), strict=True)] for pair in pairs]
    headings = [heading for _, peer in pairs for heading in (f"/ {peer}", "same")]
    rows: list[list[str]] = [["(batch, prompt, new)", *medians, *headings]]
    for index, shape in enumerate(shapes):
        row = [str(shape), *(f"{values[index]:.1f}" for values in medians.values())]
        for (ours, peer), values in zip(pairs, ratios, strict=True):
            made = list(zip(outputs[ours][str(shape)], outputs[peer][str(shape)], strict=True))
            row += [f"{values[index]:.2f}", f"{sum(a == b for a, b in made) / len(made):.2f}"]
        rows.append(row)
    means = [f"{math.prod(values) ** (1 / len(values)):.2f}" for values in ratios]
    rows.append(["geometric mean", *([""] * len(medians)), *(cell for mean in means for cell in (mean, ""))])
    return table(rows)


def _shares_kept(alone: dict[str, list[float]], beside: dict[str, list[float]], shapes: Sequence[Shape]) -> str:
    rows = [["(batch, prompt, new)", *alone]]
    for index, shape in enumerate(shapes):
        rows.append([str(shape), *(f"{beside[name][index] / alone[name][index]:.2f}" for name in alone)])
    return table(rows)


@contextmanager
def _neighbour(is_wanted: bool) -> Iterator[None]:
    """Have a process compute meanwhile, on any core, in a session of its own."""
    if not is_wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
