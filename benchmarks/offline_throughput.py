"""Output tokens per second of `LLM.generate`: raycore in runs that alternate with vLLM, llama.cpp and OpenVINO.

raycore and vLLM's CPU build run twice: as installed, and with all cores. As installed, vLLM leaves a core free. With
all cores, raycore has `num_threads`, and vLLM is bound to the cores and has Intel's OpenMP, as its documentation
recommends. vLLM runs compiled. Shapes are (batch, prompt tokens, new tokens). Prompts are random ids, decoding is
greedy, end-of-sequence is ignored, prefix caching is on. Each run is a new process that warms up, then times every
shape `--repeats` times. The tables have medians over all timings. With `--neighbour`, every run is repeated with a
process beside it that computes all the time, and the last table shows what is left of the speed. *Same* is the share of
raycore's outputs that are equal to a peer's. In 16 bits, engines round differently, and one different token changes all
that follow.

raycore and vLLM use `dtype="auto"` unless `--dtype` is given: on a processor without bfloat16 instructions, raycore
then computes in float32 and vLLM in bfloat16, and `--peer-dtype float32` makes vLLM faster.

llama.cpp's own `llama-batched-bench` runs with all cores, flash attention, and batches of 2,048 tokens in parts of
512. Its rate is for prompts and outputs together, as those of the others. It makes other random prompts, so its outputs
aren't compared. Its threads don't let go of their cores while they wait for each other, so beside other processes it is
many times slower, which says nothing of an idle machine: the load before the first run is printed.

OpenVINO GenAI's `LLMPipeline` runs with its defaults: all cores, and bfloat16 where the processor has instructions for
it. Version 2026.4 reads GGUF files in F16, Q8_0 and Q4_1, and refuses BF16.

llama.cpp and OpenVINO read the same file as raycore if the checkpoint is a GGUF file. Beside a directory, `--gguf`
names the file for them, which `gguf_files.py` writes. *Best peer* is the fastest one for the shape.

A checkpoint needs at least 8,000 token ids and positions for 4,096 tokens; the bundled model has fewer of both.

    python benchmarks/offline_throughput.py --peer-python PEER/bin/python CHECKPOINT [CHECKPOINT ...]
    python benchmarks/offline_throughput.py --llama-cpp DIR --only-all-cores FILE.gguf [FILE.gguf ...]
    python benchmarks/offline_throughput.py --openvino VENV/bin/python --only-all-cores FILE.gguf [FILE.gguf ...]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    PEER_ENVIRONMENT,
    Shape,
    median,
    parse_shape,
    peer_on_all_cores,
    run_child,
    run_llama_cpp,
    table,
    this_python,
)

from raycore.checkpoint.gguf.header import is_gguf, read_gguf
from raycore.node.resources import usable_cores
from raycore.node.versions import hardware

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
options = {"num_threads": run["num_threads"], "cpu_activation_dtype": run["cpu_activation_dtype"]}
measure(LLM, SamplingParams, **options).shutdown()
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

OPENVINO = (
    COMMON
    + """
from types import SimpleNamespace
import numpy, openvino_genai
from openvino import Tensor

class LLM:
    def __init__(self, model, **options):
        self.pipeline = openvino_genai.LLMPipeline(model, "CPU")
    def generate(self, prompts, config, use_tqdm):
        ids = numpy.array([prompt["prompt_token_ids"] for prompt in prompts])
        inputs = openvino_genai.TokenizedInputs(Tensor(ids), Tensor(numpy.ones_like(ids)))
        made = self.pipeline.generate(inputs, config).tokens
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=each)]) for each in made]

def greedy(temperature, max_tokens, ignore_eos):
    return openvino_genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=ignore_eos)

measure(LLM, greedy)
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
    gguf: Path | None = None
    """What it reads instead of checkpoints that are directories."""

    def run(self, checkpoint: str, args: argparse.Namespace) -> dict[str, Any]:
        """Time all shapes in a new process."""
        run = {
            "checkpoint": str(self.gguf or checkpoint),
            "dtype": self.dtype,
            "tp": args.tensor_parallel_size,
            "repeats": args.repeats,
            "shapes": args.shapes,
            "num_threads": self.num_threads,
            "cpu_activation_dtype": args.cpu_activation_dtype,
        }
        return run_child(self.python, self.script, [json.dumps(run)], self.environment, args.timeout_s)


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp, by its own benchmark."""

    directory: Path
    """With its programs: see `run_llama_cpp`."""
    gguf: Path | None
    """What it reads instead of checkpoints that are directories."""
    name: str = f"llama.cpp{ALL_CORES}"

    def run(self, checkpoint: str, args: argparse.Namespace) -> dict[str, Any]:
        """Time each shape in a new process."""
        file = self.gguf or Path(checkpoint)
        return {"rates": {str(shape): self._rates(file, shape, args) for shape in args.shapes}}

    def _rates(self, file: Path, shape: Shape, args: argparse.Namespace) -> list[float]:
        batch, prompt, new = shape
        numbers = {
            "-c": batch * _whole(prompt + new, 256),  # each sequence has an equal part
            "-b": 2048,
            "-ub": 512,
            "-npp": prompt,
            "-ntg": new,
            # what the program prints last is lost at times: an end that isn't needed
            "-npl": ",".join([str(batch)] * args.repeats + ["1"]),
            "-t": usable_cores(),
            "-tb": usable_cores(),
        }
        options = [str(part) for option in numbers.items() for part in option]
        options += ["-m", str(file), "-fa", "on", "--output-format", "jsonl"]
        output = run_llama_cpp(self.directory, "llama-batched-bench", *options, timeout_s=args.timeout_s)
        lines = [line for line in output.splitlines() if line.startswith("{")]
        timings = [json.loads(line) for line in lines[: args.repeats]]
        made = [(each["pl"], each["pp"], each["tg"]) for each in timings]
        if made != [shape] * args.repeats:
            raise RuntimeError(f"llama-batched-bench timed {made} for {shape}:\n{output}")
        return [batch * new / (each["t_pp"] + each["t_tg"]) for each in timings]


def _whole(number: int, step: int) -> int:
    return -(-number // step) * step


def main() -> None:
    """Run the benchmark and print the tables of each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    parser.add_argument(
        "--peer-python", metavar="PATH", help="the interpreter that has vLLM; without it only raycore runs"
    )
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="its programs, or an environment that has them")
    parser.add_argument("--openvino", metavar="PATH", help="the interpreter that has openvino-genai")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the same model for llama.cpp and OpenVINO")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument(
        "--shapes", nargs="+", type=parse_shape, default=SHAPES, metavar="BATCH,PROMPT,NEW", help=f"default: {SHAPES}"
    )
    parser.add_argument("--only-all-cores", action="store_true", help="don't run engines as installed")
    parser.add_argument("--neighbour", action="store_true", help="also measure beside a process that computes")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--peer-dtype", default=None, help="default: as --dtype")
    parser.add_argument("--cpu-activation-dtype", default="auto", help="raycore's option")
    parser.add_argument("--runs", type=int, default=2, help="processes per engine")
    parser.add_argument("--repeats", type=int, default=3, help="timings per shape in one process")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for one process")
    args = parser.parse_args()
    reads_gguf = args.llama_cpp or args.openvino
    if args.gguf and (not reads_gguf or len(args.checkpoints) > 1):
        parser.error("--gguf needs --llama-cpp or --openvino, and one checkpoint")
    if reads_gguf and not args.gguf:
        for checkpoint in args.checkpoints:
            if not is_gguf(Path(checkpoint)):
                parser.error(f"{checkpoint} isn't a GGUF file: give the peers one of the same model by --gguf")
    for checkpoint in args.checkpoints:
        _compare(checkpoint, args)


def _engines(args: argparse.Namespace) -> list[Engine | LlamaCpp]:
    threads = usable_cores() // args.tensor_parallel_size
    engines: list[Engine | LlamaCpp] = [
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
    if args.llama_cpp:
        engines.append(LlamaCpp(args.llama_cpp, args.gguf))
    if args.openvino:
        engines.append(Engine(f"OpenVINO{ALL_CORES}", args.openvino, OPENVINO, "as its file", {}, gguf=args.gguf))
    return [engine for engine in engines if ALL_CORES in engine.name or not args.only_all_cores]


def _compare(checkpoint: str, args: argparse.Namespace) -> None:
    load = os.getloadavg()[0]
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
                if not is_beside and isinstance(engine, Engine):
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
    for file in {Path(checkpoint), args.gguf or Path(checkpoint)}:
        if is_gguf(file):
            print(f"{file.name} has {_types(file)}")
    print(f"{hardware()}, {usable_cores()} cores, load {load:.1f} before the first run")
    for is_beside, by_name in medians.items():
        print(f"\noutput tokens per second{', beside a busy process' * is_beside}")
        print(_comparison(by_name, outputs, args.shapes))
    if args.neighbour:
        print("\nspeed beside a busy process / alone")
        print(_shares_kept(medians[False], medians[True], args.shapes))
    print("\nstartup s:", ", ".join(f"{name} {median(each):.1f}" for name, each in startups.items()), flush=True)


def _types(file: Path) -> str:
    """Return the types of a GGUF file's tensors, and how much there is of each."""
    sizes: Counter[str] = Counter()
    for tensor in read_gguf(file).tensors.values():
        sizes[tensor.type] += tensor.end - tensor.start
    return ", ".join(f"{size / 1e6:.1f} MB of {name}" for name, size in sizes.most_common())


def _comparison(
    medians: dict[str, list[float]], outputs: dict[str, dict[str, list[int]]], shapes: Sequence[Shape]
) -> str:
    """Return a table of the rates, of raycore's rates over those of peers, and of the share of equal outputs."""
    peers = [name for name in medians if not name.startswith("raycore")]
    ours = {name: "raycore" + ALL_CORES * name.endswith(ALL_CORES) for name in peers}
    columns = [(name, [f"{value:.1f}" for value in values], "") for name, values in medians.items()]
    for peer in peers:
        columns.append(_ratios(f"/ {peer}", medians[ours[peer]], medians[peer]))
        if outputs[peer]:
            columns.append(("same", [_same(outputs[ours[peer]], outputs[peer], shape) for shape in shapes], ""))
    if len({name.removesuffix(ALL_CORES) for name in peers}) > 1:
        best = [max(values) for values in zip(*(medians[peer] for peer in peers), strict=True)]
        columns.append(_ratios("/ best peer", medians["raycore" + ALL_CORES], best))
    headings, cells, means = zip(*columns, strict=True)
    rows = [["(batch, prompt, new)", *headings]]
    rows += [[str(shape), *row] for shape, row in zip(shapes, zip(*cells, strict=True), strict=True)]
    return table([*rows, ["geometric mean", *means]])


def _ratios(heading: str, ours: list[float], peer: list[float]) -> tuple[str, list[str], str]:
    ratios = [own / other for own, other in zip(ours, peer, strict=True)]
    return heading, [f"{ratio:.2f}" for ratio in ratios], f"{math.prod(ratios) ** (1 / len(ratios)):.2f}"


def _same(ours: dict[str, list[int]], peer: dict[str, list[int]], shape: Shape) -> str:
    made = list(zip(ours[str(shape)], peer[str(shape)], strict=True))
    return f"{sum(a == b for a, b in made) / len(made):.2f}"


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
