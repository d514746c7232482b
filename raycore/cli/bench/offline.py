"""`raycore bench throughput` and `raycore bench latency`: measure an engine in this process."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from raycore.cli.bench.samples import samples
from raycore.cli.engine_options import chosen_engine_options
from raycore.cli.output import save
from raycore.errors import InvalidConfig
from raycore.llm import LLM
from raycore.sampling_params import SamplingParams

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def bench_throughput(args: argparse.Namespace) -> int:
    """Generate from all prompts at once, and print how many requests and tokens per second that is."""
    with LLM(use_tqdm_on_load=sys.stderr.isatty(), **_chosen(args)) as llm:
        chosen = samples(args, llm.get_tokenizer())
        prompts: list[Any] = [each.prompt for each in chosen]
        params = [_params(args, each.output_len) for each in chosen]
        if args.num_warmups:
            llm.generate(prompts[: args.num_warmups], params[: args.num_warmups], use_tqdm=False)
            llm.reset_prefix_cache()
        begun_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
        elapsed_s = time.perf_counter() - begun_s
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    results = {
        "elapsed_time": elapsed_s,
        "num_requests": len(outputs),
        "total_num_tokens": num_input + num_output,
        "requests_per_second": len(outputs) / elapsed_s,
        "tokens_per_second": (num_input + num_output) / elapsed_s,
    }
    print(
        f"Throughput: {results['requests_per_second']:.2f} requests/s, "
        f"{results['tokens_per_second']:.2f} total tokens/s, {num_output / elapsed_s:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_input}")
    print(f"Total num output tokens:  {num_output}")
    _write(args.output_json, results)
    return 0


def bench_latency(args: argparse.Namespace) -> int:
    """Generate from the same batch again and again, and print how long that takes."""
    for flag in ("input_len", "output_len", "batch_size", "num_iters"):
        if getattr(args, flag) < 1:
            raise InvalidConfig(f"--{flag.replace('_', '-')} {getattr(args, flag)} isn't at least 1")
    # otherwise, prompts of batches after the first would be found in the cache
    with LLM(use_tqdm_on_load=sys.stderr.isatty(), **_chosen(args, enable_prefix_caching=False)) as llm:
        rng = np.random.default_rng(args.seed)
        ids = rng.integers(0, llm.get_tokenizer().vocab_size, (args.batch_size, args.input_len)).tolist()
        prompts: list[Any] = [{"prompt_token_ids": each} for each in ids]
        params = _params(args, args.output_len)
        times_s: list[float] = []
        num_all = args.num_iters_warmup + args.num_iters
        for index in tqdm(range(num_all), disable=not sys.stderr.isatty()):
            begun_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if index >= args.num_iters_warmup:
                times_s.append(time.perf_counter() - begun_s)
    percentiles = {each: float(np.percentile(times_s, each)) for each in _PERCENTILES}
    print(f"Avg latency: {np.mean(times_s)} seconds")
    for percentage, seconds in percentiles.items():
        print(f"{percentage}% percentile latency: {seconds} seconds")
    results = {"avg_latency": float(np.mean(times_s)), "latencies": times_s, "percentiles": percentiles}
    _write(args.output_json, results)
    return 0


def _chosen(args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    return {"seed": args.seed, **defaults, **chosen_engine_options(args)}


def _params(args: argparse.Namespace, output_len: int) -> SamplingParams:
    return SamplingParams(
        n=args.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=output_len,
        detokenize=not args.disable_detokenize,
    )


def _write(path: str | None, results: Mapping[str, Any]) -> None:
    if path is not None:
        save(Path(path), json.dumps(results, indent=4))
