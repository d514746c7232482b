"""Output tokens per second with and without speculation, and beside vLLM's CPU build.

Prompts are of two kinds. *Repeating* ones are continued by repeating what they end with: random prompts after which the
model, greedily, gets into a loop, with the tokens that it generates up to the end of the loop's second round, and at
least 8 of the loop. *Other* prompts are random, and the model samples at temperature 1. Prefix caching is off.

With `--input-len 1024 --cached-prompts`, prompts have that many tokens, and the prefix cache has them: as when a
document is asked about for the second time. Repeating ones are extended by what the model generates.

In each process of raycore, an engine with speculation and one without take turns, timing by timing, on the same
prompts. The table has medians of the tokens per second, and the median of the ratios. vLLM runs in processes of its
own, bound to all cores and with Intel's OpenMP, as its documentation recommends.

    python benchmarks/speculation.py [CHECKPOINT ...]                     default: the bundled model
    python benchmarks/speculation.py --peer-python PEER/bin/python CHECKPOINT
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import PEER_ENVIRONMENT, median, peer_on_all_cores, run_child, table, this_python

from raycore.demo import demo_model_path

KINDS = ("repeating", "other")
_LEAST_INPUT = 32
"""Number of random tokens that a repeating prompt begins with."""
_MOST_BEFORE_LOOP = 96
"""Maximum number of generated tokens in a repeating prompt."""

COMMON = """
import json, random, sys, time, zlib
with open(sys.argv[1]) as file:
    run = json.load(file)

def make(LLM, speculative_config, **options):
    return LLM(model=run["checkpoint"], dtype=run["dtype"], max_model_len=run["max_model_len"], max_num_seqs=64,
               speculative_config=speculative_config, **options)

def generate(llm, prompts, params):
    begun = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, sum(map(len, tokens)) / (time.perf_counter() - begun)

def random_prompts(seed, number, length):
    rnd = random.Random(seed)
    return [[rnd.randrange(10, run["vocab_size"]) for _ in range(length)] for _ in range(number)]

def measure(SamplingParams, engines):
    found = []
    for kind in run["kinds"]:
        temperature = 0 if kind == "repeating" else 1
        for batch in run["batches"]:
            for repeat in range(1 + run["repeats"]):
                params = SamplingParams(
                    temperature=temperature, max_tokens=run["num_tokens"], ignore_eos=True, seed=1 + repeat
                )
                # to compute new prompts for the cache each time would take longer than the timings
                seed = batch if run["cached_prompts"] else f"{batch} {repeat}"
                prompts = random_prompts(seed, batch, run["input_len"])
                if kind == "repeating":
                    prompts = [run["repeating"][(repeat + i) % len(run["repeating"])] for i in range(batch)]
                if run["cached_prompts"]:
                    for llm in engines.values():
                        generate(llm, prompts, SamplingParams(max_tokens=1))
                in_turn = sorted(engines, reverse=repeat % 2 == 1)
                made = {name: generate(engines[name], prompts, params) for name in in_turn}
                # the first one warms up
                if repeat:
                    rates = {name: rate for name, (_, rate) in made.items()}
                    outputs = {name: [zlib.crc32(str(ids).encode()) for ids in of] for name, (of, _) in made.items()}
                    found.append({"kind": kind, "batch": batch, "rates": rates, "outputs": outputs})
    print("@result " + json.dumps({"timings": found}), flush=True)
"""

SELECT = (
    COMMON
    + """
from raycore import LLM, SamplingParams

def up_to_loop(tokens):
    # the tokens up to the end of the second round of the loop that goes on to the end, or None
    for period in range(1, 33):
        start = len(tokens)
        while start > period and tokens[start - 1] == tokens[start - 1 - period]:
            start -= 1
        end = start + period + max(period, 8)
        if end <= run["most_before_loop"]:
            return tokens[:end]

found = []
num_tokens = run["most_before_loop"] + run["num_tokens"]
params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
with make(LLM, None, standby_delay_s=None) as llm:
    for seed in range(30):
        candidates = random_prompts(f"candidates {seed}", 64, run["least_input"])
        for prompt, tokens in zip(candidates, generate(llm, candidates, params)[0]):
            before = up_to_loop(tokens)
            if before is not None:
                found.append(prompt + before)
        if len(found) >= max(run["batches"]):
            break
    lengths = [max(run["input_len"] - len(prompt), 0) for prompt in found]
    if any(lengths):
        params = SamplingParams(temperature=0, max_tokens=max(lengths), ignore_eos=True)
        continued = generate(llm, found, params)[0]
        found = [prompt + tokens[:length] for prompt, tokens, length in zip(found, continued, lengths)]
print("@result " + json.dumps({"repeating": found}), flush=True)
"""
)

OURS = (
    COMMON
    + """
from raycore import LLM, SamplingParams
options = {"standby_delay_s": None, "enable_prefix_caching": run["cached_prompts"]}
engines = {"off": make(LLM, None, **options), "on": make(LLM, run["speculative_config"], **options)}
measure(SamplingParams, engines)
for llm in engines.values():
    llm.shutdown()
"""
)

PEER = (
    COMMON
    + """
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    options = {"enable_prefix_caching": run["cached_prompts"], "disable_log_stats": True}
    name, config = ("on", run["speculative_config"]) if run["is_on"] else ("off", None)
    measure(SamplingParams, {name: make(LLM, config, **options)})
"""
)


def main() -> None:
    """Run the benchmark and print a table for each checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT", default=[str(demo_model_path())])
    parser.add_argument("--peer-python", metavar="PATH", help="the interpreter that has vLLM")
    parser.add_argument("--speculative-config", default='{"method": "ngram", "num_speculative_tokens": 8}')
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--input-len", type=int, default=_LEAST_INPUT, help="tokens in a prompt")
    parser.add_argument("--cached-prompts", action="store_true", help="the prefix cache has the prompts")
    parser.add_argument("--num-tokens", type=int, default=128, help="generated for each request")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--runs", type=int, default=2, help="processes")
    parser.add_argument("--repeats", type=int, default=5, help="timings of each kind and batch in a process")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for one process")
    args = parser.parse_args()
    if args.input_len < _LEAST_INPUT:
        parser.error(f"--input-len {args.input_len}: at least {_LEAST_INPUT}")
    for checkpoint in args.checkpoints:
        _compare(checkpoint, args)


def _compare(checkpoint: str, args: argparse.Namespace) -> None:
    timings: dict[str, list[dict[str, Any]]] = defaultdict(list)
    is_repeating = "repeating" in args.kinds
    repeating = _run(checkpoint, args, this_python(), SELECT, {})["repeating"] if is_repeating else []
    for _ in range(args.runs):
        timings["raycore"] += _run(checkpoint, args, this_python(), OURS, {}, repeating=repeating)["timings"]
        if args.peer_python:
            environment = PEER_ENVIRONMENT | peer_on_all_cores(args.peer_python, 1)
            for is_on in (False, True):
                more = {"repeating": repeating, "is_on": is_on}
                timings["vLLM"] += _run(checkpoint, args, args.peer_python, PEER, environment, **more)["timings"]
    print(f"\n{Path(checkpoint).name}, dtype {args.dtype}, {args.speculative_config}: output tokens per second")
    cached = "in the prefix cache" if args.cached_prompts else "not cached"
    print(f"{args.input_len} tokens in other prompts, at least as many in repeating ones, {cached}")
    print(f"{args.num_tokens} tokens generated for each request")
    print(f"medians of {args.runs} processes x {args.repeats} timings; {len(repeating)} different repeating prompts")
    rows = [["prompts", "batch", "engine", "off", "on", "on / off", "same outputs"]]
    for kind in args.kinds:
        for batch in args.batches:
            for engine, of_engine in timings.items():
                chosen = [each for each in of_engine if (each["kind"], each["batch"]) == (kind, batch)]
                rows.append([kind, str(batch), engine, *_cells(chosen)])
    print(table(rows), flush=True)


def _cells(timings: list[dict[str, Any]]) -> list[str]:
    """Return rates without and with speculation, their ratio, and the share of outputs that are the same."""
    rates = {name: [each["rates"][name] for each in timings if name in each["rates"]] for name in ("off", "on")}
    if len(timings) == len(rates["on"]):  # both in the same process, one after the other
        ratio = median([on / off for off, on in zip(rates["off"], rates["on"], strict=True)])
    else:
        ratio = median(rates["on"]) / median(rates["off"])
    # both engines have the same prompts in the same order
    off, on = ([ids for each in timings for ids in each["outputs"].get(name, ())] for name in ("off", "on"))
    same = sum(a == b for a, b in zip(off, on, strict=True)) / len(off)
    return [f"{median(rates['off']):.1f}", f"{median(rates['on']):.1f}", f"{ratio:.2f}", f"{same:.3f}"]


def _run(
    checkpoint: str, args: argparse.Namespace, python: str, script: str, environment: dict[str, str], **more: Any
) -> dict[str, Any]:
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    run = {
        "checkpoint": checkpoint,
        "dtype": args.dtype,
        "vocab_size": config["vocab_size"],
        "max_model_len": args.input_len + _MOST_BEFORE_LOOP + args.num_tokens,
        "input_len": args.input_len,
        "least_input": _LEAST_INPUT,
        "cached_prompts": args.cached_prompts,
        "most_before_loop": _MOST_BEFORE_LOOP,
        "num_tokens": args.num_tokens,
        "speculative_config": json.loads(args.speculative_config),
        "kinds": args.kinds,
        "batches": args.batches,
        "repeats": args.repeats,
        **more,
    }
    # prompts may be longer than arguments of a process
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(run))
        file.flush()
        return run_child(python, script, [file.name], environment, args.timeout_s)


if __name__ == "__main__":
    main()
