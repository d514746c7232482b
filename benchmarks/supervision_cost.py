"""What watching over ranks costs while nothing fails: throughput with the supervisor on and off, in turn, in one run.

Off means that nobody waits for the ranks' ends, asks them for signs of life, or looks for drained nodes. Two engines of
the same shape generate the same requests, one after the other, in alternating order.

    python benchmarks/supervision_cost.py [CHECKPOINT] [--dp 2]
"""

from __future__ import annotations

import argparse
import time

from common import median, table

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path, held_out_problems

AT_MOST = 1.02
SETTLES_S = 15.0
"""By then standbys have come up, and rest."""


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(demo_model_path()), help="default: the bundled model")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    options = {"data_parallel_size": args.dp, "num_threads": 1, "use_tqdm_on_load": False}
    rates: dict[str, list[float]] = {"on": [], "off": []}
    with LLM(args.checkpoint, **options) as watched, LLM(args.checkpoint, **options) as unwatched:
        unwatched._supervisor.stop()
        engines = {"on": watched, "off": unwatched}
        time.sleep(SETTLES_S)
        for number in range(args.rounds + 1):
            for name in sorted(engines, reverse=bool(number % 2)):
                rate = tokens_per_s(engines[name])
                if number:  # the first warms up
                    rates[name].append(rate)
    # of neighbours in time, because a machine's speed drifts
    cost = median([off / on for on, off in zip(rates["on"], rates["off"], strict=True)])
    verdict = "held" if cost <= AT_MOST else "NOT HELD"
    rows: list[list[object]] = [["supervision", "tokens/s, median", "lowest", "highest"]]
    rows += [[name, f"{median(r):.0f}", f"{min(r):.0f}", f"{max(r):.0f}"] for name, r in rates.items()]
    print(table(rows))
    print(f"off / on, median of pairs: {cost:.3f}, at most {AT_MOST}: {verdict}")


def tokens_per_s(llm: LLM) -> float:
    """Of one batch."""
    prompts = [prompt for prompt, _ in held_out_problems(3, 128)]
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - started_s)


if __name__ == "__main__":
    main()
