"""Tokens per second, memory and log probabilities of quantized checkpoints, beside the one that they were made of.

All engines run in one process and take turns, timing by timing, on the same random prompts. Decoding is greedy. If
several new tokens are generated, all whole blocks of the prompts are computed before the time is taken. The tables have
medians, and the medians of the ratios to the first checkpoint. *Memory* is what the worker's process has for itself,
without the KV cache. *Log probabilities*: the mean difference of a prompt's, and how often the most likely token is the
same.

    python benchmarks/quantization.py CHECKPOINT QUANTIZED [QUANTIZED ...]
    python benchmarks/quantization.py CHECKPOINT int8                  with the option quantization
    python benchmarks/quantization.py CHECKPOINT int8_per_token_head   with the option kv_cache_dtype
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from pathlib import Path

from common import Shape, median, parse_shape, table

from raycore import LLM, SamplingParams

SHAPES: list[Shape] = [(1, 8, 64), (16, 8, 32), (64, 8, 16), (1, 1024, 1)]
OPTIONS = {"int8": {"quantization": "int8"}, "int8_per_token_head": {"kv_cache_dtype": "int8_per_token_head"}}


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--shapes", nargs="+", type=parse_shape, default=SHAPES, metavar="BATCH,PROMPT,NEW", help=f"default: {SHAPES}"
    )
    args = parser.parse_args()
    engines = {Path(name).name: _start(args.checkpoints[0], name, args.dtype) for name in args.checkpoints}
    try:
        memory = {name: _worker_memory(llm) for name, llm in engines.items()}
        print(_speeds(engines, args.shapes, args.repeats), flush=True)
        print(_rest(engines, memory))
    finally:
        for llm in engines.values():
            llm.shutdown()


def _start(plain: str, name: str, dtype: str) -> LLM:
    options = OPTIONS.get(name, {})
    llm = LLM(plain if options else name, dtype=dtype, max_num_seqs=64, **options)  # pyright: ignore[reportArgumentType]
    llm.generate([_prompt(random.Random(0), 8)], SamplingParams(max_tokens=2), use_tqdm=False)
    return llm


def _prompt(rnd: random.Random, length: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [rnd.randrange(10, 200) for _ in range(length)]}


def _worker_memory(llm: LLM) -> int:
    """The bytes that the worker's process doesn't share with others. Unused blocks of the KV cache take none."""
    return int(llm.collective_rpc(lambda worker: _own_bytes())[0])


def _own_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def _speeds(engines: dict[str, LLM], shapes: list[Shape], repeats: int) -> str:
    rnd = random.Random(1)
    first = next(iter(engines))
    rows: list[list[object]] = [["(batch, prompt, new)", *engines, *(f"{name} / {first}" for name in engines)]]
    for batch, length, new in shapes:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        rates: dict[str, list[float]] = defaultdict(list)
        for repeat in range(1 + repeats):
            prompts = [_prompt(rnd, length) for _ in range(batch)]
            for name in sorted(engines, reverse=repeat % 2 == 1):
                if new > 1:
                    engines[name].generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
                begun = time.perf_counter()
                engines[name].generate(prompts, params, use_tqdm=False)
                if repeat:  # the first one warms up
                    num_tokens = batch * (new if new > 1 else length)
                    rates[name].append(num_tokens / (time.perf_counter() - begun))
        ratios = [median([own / of for own, of in zip(rates[name], rates[first], strict=True)]) for name in engines]
        speeds = [f"{median(rates[name]):.0f}" for name in engines]
        rows.append([str((batch, length, new)), *speeds, *(f"{ratio:.2f}" for ratio in ratios)])
    return f"tokens per second: new ones, or with one new token those of the prompts\n{table(rows)}"


def _rest(engines: dict[str, LLM], memory: dict[str, int]) -> str:
    rnd = random.Random(2)
    prompts = [_prompt(rnd, 128) for _ in range(8)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found = {name: _logprobs(llm, prompts, params) for name, llm in engines.items()}
    expected = next(iter(found.values()))
    rows: list[list[object]] = [["", "memory MB", "log probabilities differ by", "same most likely token"]]
    for name, own in found.items():
        pairs = list(zip(own, expected, strict=True))
        difference = sum(abs(a - b) for (a, _), (b, _) in pairs) / len(pairs)
        same = sum(a == b for (_, a), (_, b) in pairs) / len(pairs)
        rows.append([name, f"{memory[name] / 1e6:.0f}", f"{difference:.4f}", f"{same:.1%}"])
    return table(rows)


def _logprobs(llm: LLM, prompts: list[dict[str, list[int]]], params: SamplingParams) -> list[tuple[float, int]]:
    """For each token of the prompts but the first, its log probability, and the token that was the most likely one."""
    found: list[tuple[float, int]] = []
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        of_tokens = output.prompt_logprobs
        assert of_tokens is not None
        for token, of_token in zip(prompt["prompt_token_ids"][1:], of_tokens[1:], strict=True):
            assert of_token is not None
            best = min(of_token.items(), key=lambda item: item[1].rank or 1)[0]
            found.append((of_token[token].logprob, best))
    return found


if __name__ == "__main__":
    main()
