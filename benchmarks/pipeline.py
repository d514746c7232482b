"""Pipeline parallelism beside tensor parallelism on one machine, and what the stages of the pipeline wait for.

Greedy requests of `--prompt` random tokens and `--new` new ones run at once, 1, 16 and 64 of them, on one worker, on
tensor-parallel workers, and on as many stages. All workers together have all cores. The first table has output tokens
per second, as medians over `--repeats` timings.

The second table has, for each stage, the share of the time in which its worker doesn't compute, as measured there, and
how much of that is spent waiting for hidden states or for room to send them. Beside it is what would be left if nothing
but computing took time: while one stage computes, others wait if their steps are shorter, or if fewer requests run than
there are stages. This is computed twice: from the multiplications by which the layers were divided, and from how long
the stages' steps took.

With `--peer-python`, the first table also has vLLM's CPU build with as many stages, on the same prompts and cores, and
the share of its outputs that are the same as those of raycore's stages.

    python benchmarks/pipeline.py CHECKPOINT
    python benchmarks/pipeline.py --peer-python PEER/bin/python CHECKPOINT
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from common import PEER_ENVIRONMENT, median, peer_on_all_cores, run_child, table

from raycore import LLM, SamplingParams
from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stages import layer_costs
from raycore.config import EngineConfig, resolve
from raycore.demo import demo_model_path
from raycore.node.resources import usable_cores

BATCHES = (1, 16, 64)
MAX_MODEL_LEN = 1024
_FIRST_ID = 3

PEER = """
import json, sys, time
run = json.loads(sys.argv[1])
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    # stages run on its CPU build only in worker processes, and only compiled
    llm = LLM(model=run["checkpoint"], dtype=run["dtype"], max_model_len=run["max_model_len"], max_num_seqs=64,
              pipeline_parallel_size=run["size"], distributed_executor_backend="mp", enforce_eager=False,
              enable_prefix_caching=False, disable_log_stats=True)
    params = SamplingParams(temperature=0, max_tokens=run["new"], ignore_eos=True)
    found = []
    for of_batch in run["prompts"]:
        rates, outputs = [], []
        for prompts in of_batch:
            begun = time.perf_counter()
            made = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            outputs += [list(output.outputs[0].token_ids) for output in made]
            rates.append(len(prompts) * run["new"] / (time.perf_counter() - begun))
        found.append({"rates": rates[1:], "outputs": outputs})
    print("@result " + json.dumps({"batches": found}), flush=True)
"""

Times = list[tuple[float, float]]
"""Of each stage's first worker: seconds of computing, and of waiting for another stage."""


def main() -> None:
    """Run the benchmark and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(demo_model_path()), metavar="CHECKPOINT")
    parser.add_argument("--size", type=int, default=2, help="number of stages, and of tensor-parallel workers")
    parser.add_argument("--pipeline-layers", metavar="N,N", help="the number of layers of each stage")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of a request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer-python", metavar="PATH", help="the interpreter that has vLLM")
    args = parser.parse_args()
    threads = max(1, usable_cores() // args.size)
    shapes: dict[str, dict[str, Any]] = {
        "one worker": {"num_threads": usable_cores()},
        f"TP {args.size}": {"tensor_parallel_size": args.size, "num_threads": threads},
        f"PP {args.size}": {"pipeline_parallel_size": args.size, "num_threads": threads},
    }
    if args.pipeline_layers is not None:
        shapes[f"PP {args.size}"]["pipeline_layers"] = args.pipeline_layers
    rates: dict[str, list[float]] = {}
    waits: list[list[str]] = []
    outputs: list[list[list[int]]] = []
    for name, shape in shapes.items():
        options = {"dtype": args.dtype, "max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False, **shape}
        config = resolve(args.checkpoint, **options)
        with LLM(args.checkpoint, standby_delay_s=None, use_tqdm_on_load=False, **options) as llm:
            rates[name], outputs = [], []
            for batch in BATCHES:
                rate, wall_s, times, tokens = _measure(llm, config, batch, args)
                rates[name].append(rate)
                outputs.append(tokens)
                if len(times) > 1:
                    waits += _waits(config, batch, wall_s, times)
    print(f"\n{Path(args.checkpoint).name}, {usable_cores()} cores: output tokens per second")
    *_, tensor, pipeline = rates.values()
    rows = [["requests", *rates, f"PP {args.size} / TP {args.size}"]]
    for index, batch in enumerate(BATCHES):
        ratio = f"{pipeline[index] / tensor[index]:.2f}"
        rows.append([str(batch), *(f"{of_shape[index]:.1f}" for of_shape in rates.values()), ratio])
    if args.peer_python:
        rows[0] += [f"vLLM PP {args.size}", "PP / vLLM's", "same outputs"]
        for row, ours, tokens, of_peer in zip(rows[1:], pipeline, outputs, _measure_peer(args), strict=True):
            rate = median(of_peer["rates"])
            same = sum(a == b for a, b in zip(tokens, of_peer["outputs"], strict=True)) / len(tokens)
            row += [f"{rate:.1f}", f"{ours / rate:.2f}", f"{same:.3f}"]
    print(table(rows))
    print("\nshare of the time in which a stage's worker doesn't compute")
    header = ["requests", "stage", "layers", "waits", "of it for stages", "by multiplications", "by the steps' times"]
    print(table([header, *waits]), flush=True)


def _prompts(batch: int, args: argparse.Namespace) -> list[list[list[int]]]:
    """Return the prompts of each timing. The first one warms up."""
    rnd, vocab_size = random.Random(batch), load_model_spec(Path(args.checkpoint)).vocab_size
    return [
        [[rnd.randrange(_FIRST_ID, vocab_size) for _ in range(args.prompt)] for _ in range(batch)]
        for _ in range(args.repeats + 1)
    ]


def _measure_peer(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return vLLM's rates and outputs of each batch."""
    run = {
        "checkpoint": args.checkpoint,
        "dtype": args.dtype,
        "max_model_len": MAX_MODEL_LEN,
        "size": args.size,
        "new": args.new,
        "prompts": [_prompts(batch, args) for batch in BATCHES],
    }
    environment = PEER_ENVIRONMENT | peer_on_all_cores(args.peer_python, args.size)
    return run_child(args.peer_python, PEER, [json.dumps(run)], environment, 1800.0)["batches"]


def _measure(
    llm: LLM, config: EngineConfig, batch: int, args: argparse.Namespace
) -> tuple[float, float, Times, list[list[int]]]:
    """Return the median rate, of all timings together the time and what the stages have done in it, and the outputs."""
    rates: list[float] = []
    outputs: list[list[int]] = []
    wall_s = 0.0
    sums = [(0.0, 0.0)] * config.parallel.pipeline_parallel_size
    params = SamplingParams(temperature=0, max_tokens=args.new, ignore_eos=True)
    for repeat, prompts in enumerate(_prompts(batch, args)):
        before = _times(llm, config)
        started_s = time.perf_counter()
        made = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        elapsed_s = time.perf_counter() - started_s
        outputs += [list(output.outputs[0].token_ids) for output in made]
        after = _times(llm, config)
        if repeat:
            rates.append(batch * args.new / elapsed_s)
            wall_s += elapsed_s
            sums = [
                (computed + end[0] - start[0], waited + end[1] - start[1])
                for (computed, waited), start, end in zip(sums, before, after, strict=True)
            ]
    return median(rates), wall_s, sums, outputs


def _times(llm: LLM, config: EngineConfig) -> Times:
    return [tuple(each) for each in llm.collective_rpc("step_times")][:: config.parallel.tensor_parallel_size]


def _waits(config: EngineConfig, batch: int, wall_s: float, times: Times) -> list[list[str]]:
    costs = layer_costs(config.model.spec)
    by_stage = [float(sum(costs[layer] for layer in stage.layers)) for stage in config.stages()]
    predicted = _idle_shares(by_stage, batch)
    from_times = _idle_shares([computed_s for computed_s, _ in times], batch)
    return [
        [
            str(batch),
            str(index),
            str(len(stage.layers)),
            f"{1 - times[index][0] / wall_s:.2f}",
            f"{times[index][1] / wall_s:.2f}",
            f"{predicted[index]:.2f}",
            f"{from_times[index]:.2f}",
        ]
        for index, stage in enumerate(config.stages())
    ]


def _idle_shares(steps: list[float], batch: int) -> list[float]:
    """Return each stage's share of idle time if its steps take so long, and nothing else takes time."""
    per_step = max(*steps, sum(steps) / min(batch, len(steps)))
    return [1 - step / per_step for step in steps]


if __name__ == "__main__":
    main()
