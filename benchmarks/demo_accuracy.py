"""The bundled model's accuracy on problems held out from its training, with TP 1, TP 2, and DP 2 under load.

A wrong mask, position or shard shows up as wrong sums. *Under load*: long sampled requests keep every rank busy, so
that the problems run in mixed batches.

    python benchmarks/demo_accuracy.py
    python benchmarks/demo_accuracy.py --quantization int8
    python benchmarks/demo_accuracy.py --kv-cache-dtype int8_per_token_head
"""

from __future__ import annotations

import argparse
import threading

from common import table

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path, held_out_problems

LEAST = {2: 0.99, 3: 0.97}


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="problems per number of digits")
    parser.add_argument("--model", default=demo_model_path(), help="default: the bundled model")
    parser.add_argument("--quantization", choices=["int8"], default=None)
    parser.add_argument("--kv-cache-dtype", choices=["auto", "int8_per_token_head"], default="auto")
    args = parser.parse_args()
    rows: list[list[object]] = [["shape", "digits", "problems", "right", "accuracy", "at least", ""]]
    common = {"quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype}
    for name, options, is_loaded in (
        ("TP 1", {}, False),
        ("TP 2", {"tensor_parallel_size": 2}, False),
        ("DP 2, loaded", {"data_parallel_size": 2}, True),
    ):
        with LLM(args.model, **common, **options) as llm:  # pyright: ignore[reportArgumentType]
            for digits, least in LEAST.items():
                right, asked = accuracy(llm, digits, args.count, is_loaded)
                verdict = "held" if right / asked >= least else "MISSED"
                rows.append([name, digits, asked, right, f"{right / asked:.2%}", f"{least:.0%}", verdict])
    print(table(rows))


def accuracy(llm: LLM, digits: int, count: int, is_loaded: bool) -> tuple[int, int]:
    """The number of correct answers, and of problems."""
    problems = list(held_out_problems(digits, count))
    load = threading.Thread(target=_load, args=(llm,)) if is_loaded else None
    if load:
        load.start()
    # more tokens than an answer has, so that an answer that continues is wrong
    params = SamplingParams(temperature=0, max_tokens=8)
    outputs = llm.generate([prompt for prompt, _ in problems], params, use_tqdm=False)
    if load:
        load.join()
    return sum(out.outputs[0].text == answer for out, (_, answer) in zip(outputs, problems, strict=True)), len(problems)


def _load(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True, seed=1)
    llm.generate([f"{i} + {i} = {2 * i}\n" for i in range(64)], params, use_tqdm=False)


if __name__ == "__main__":
    main()
