"""Workers that hold different tokens' keys and values, beside tensor-parallel workers that hold copies of them.

Each engine has two workers, with half of the cores each. For each length of the context, greedy requests run on one
engine after the other, all of which are started first: once for one token, and once for all. The tables, in Markdown,
have prompt tokens per second of the former, and output tokens per second in what the latter takes longer, as medians
over `--repeats` timings. Each timing has prompts of its own, of random tokens.

    python benchmarks/context_parallel.py                              a random model with one key-value head
    python benchmarks/context_parallel.py --kv-heads 2 --tp 4          with two, on twice as many workers
    python benchmarks/context_parallel.py CHECKPOINT                   whose key-value heads are fewer than workers
    python benchmarks/context_parallel.py --contexts 64,1024 --requests 1,4 --new 16 --repeats 1    short
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from common import median

from raycore import LLM, SamplingParams
from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.node.resources import usable_cores

RANDOM_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_FIRST_ID = 3


class Timing(NamedTuple):
    """Some requests on one engine."""

    first_s: float
    """Time until all requests have one token."""
    all_s: float
    """Time, from the prompts on, until they have all tokens."""
    outputs: list[list[int]]


def main() -> None:
    """Run the benchmark and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="default: a random model")
    parser.add_argument("--kv-heads", type=int, default=1, help="of the random model")
    parser.add_argument("--tp", type=int, default=2, help="number of workers of each engine")
    parser.add_argument("--contexts", default="64,1024,8192", metavar="N,N", help="tokens of a prompt")
    parser.add_argument("--requests", default="1,8", metavar="N,N", help="requests at a time")
    parser.add_argument("--new", type=int, default=64, help="new tokens of a request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    contexts, batches = ([int(each) for each in text.split(",")] for text in (args.contexts, args.requests))
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        source = _source(args, Path(directory))
        options = source | {
            "dtype": args.dtype,
            "max_model_len": max(contexts) + args.new + 1,
            "max_num_seqs": max(batches),
            "enable_prefix_caching": False,
            "num_threads": max(1, usable_cores() // args.tp),
            "num_gpu_blocks_override": max(batches) * -(-(max(contexts) + args.new + 1) // 16),
        }
        engines: dict[str, LLM] = {}
        sizes: list[list[str]] = [["engine", "KV cache: bytes of a token on a worker", "tokens in all blocks"]]
        for name, shape in _shapes(args).items():
            config = resolve(**options, **shape)
            engines[name] = llm = stack.enter_context(
                LLM(**options, **shape, standby_delay_s=None, use_tqdm_on_load=False)
            )
            spec, (info,) = config.model.spec, llm.engine_infos
            numbers = 2 * spec.num_layers * spec.kv_heads_per_rank(config.parallel.tensor_parallel_size) * spec.head_dim
            num_bytes = numbers * (4 if info.dtype == "float32" else 2) / config.parallel.context_parallel_size
            sizes.append([name, f"{num_bytes:.0f}", str(info.num_kv_tokens)])
        vocab_size = resolve(**options).model.spec.vocab_size
        rows = [
            ["context", "requests", "engine", "prompt tokens/s", "ratio", "output tokens/s", "ratio", "equal tokens"]
        ]
        for context in contexts:
            for batch in batches:
                rows += _compare(engines, (context, batch, vocab_size), args)
        print(f"\n{args.checkpoint or 'a random model'}, {usable_cores()} cores")
        print(f"\n{_markdown(sizes)}\n\n{_markdown(rows)}", flush=True)


def _markdown(rows: list[list[str]]) -> str:
    header, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *others])


def _source(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The options that say which model."""
    if args.checkpoint is not None:
        return {"model": args.checkpoint}
    (directory / "config.json").write_text(json.dumps(RANDOM_MODEL | {"num_key_value_heads": args.kv_heads}))
    return {"model": str(directory), "tokenizer": str(demo_model_path()), "load_format": "dummy"}


def _shapes(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The options of each engine. The first one is what the others are compared with."""
    tp = args.tp
    return {
        f"TP {tp}": {"tensor_parallel_size": tp},
        f"TP {tp}, DCP 2": {"tensor_parallel_size": tp, "decode_context_parallel_size": 2},
        f"TP {tp // 2}, PCP 2": {"tensor_parallel_size": tp // 2, "prefill_context_parallel_size": 2},
    }


def _compare(engines: dict[str, LLM], sizes: tuple[int, int, int], args: argparse.Namespace) -> list[list[str]]:
    """Return a row for each engine. `sizes`: tokens of a prompt, number of requests, and size of the vocabulary."""
    context, batch, vocab_size = sizes
    rnd = random.Random(context * 1000 + batch)
    timings: dict[str, list[Timing]] = {name: [] for name in engines}
    for repeat in range(args.repeats + 1):
        prompts = [[rnd.randrange(_FIRST_ID, vocab_size) for _ in range(context)] for _ in range(batch)]
        for name, llm in engines.items():
            timing = _time(llm, prompts, args.new)
            if repeat:  # the first one warms up
                timings[name].append(timing)
    expected, *_ = timings.values()
    rows: list[list[str]] = []
    for name, own in timings.items():
        pairs = [(a, b) for x, y in zip(own, expected, strict=True) for a, b in zip(x.outputs, y.outputs, strict=True)]
        (prompt, output), (prompt_base, output_base) = (_rates(found, sizes, args.new) for found in (own, expected))
        rates = [f"{prompt:.0f}", f"{prompt / prompt_base:.2f}", f"{output:.1f}", f"{output / output_base:.2f}"]
        rows.append([str(context), str(batch), name, *rates, f"{sum(a == b for a, b in pairs)} of {len(pairs)}"])
    return rows


def _rates(timings: list[Timing], sizes: tuple[int, int, int], num_new: int) -> tuple[float, float]:
    """Return prompt tokens and output tokens per second. The latter is NaN if decodes took no measurable time."""
    context, batch, _ = sizes
    first_s, all_s = median([each.first_s for each in timings]), median([each.all_s for each in timings])
    decodes_s = all_s - first_s if all_s > first_s else math.nan
    return batch * context / first_s, batch * (num_new - 1) / decodes_s


def _time(llm: LLM, prompts: list[list[int]], num_new: int) -> Timing:
    inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    started_s = time.perf_counter()
    llm.generate(inputs, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    first_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    made = llm.generate(inputs, SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True), use_tqdm=False)
    all_s = time.perf_counter() - started_s
    return Timing(first_s, all_s, [list(output.outputs[0].token_ids) for output in made])


if __name__ == "__main__":
    main()
