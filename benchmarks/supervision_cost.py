"""The cost of supervision while nothing fails: throughput with the supervisor on and off, alternately.

With the supervisor off, nothing watches for ranks that end or stall, or for nodes that drain. Two engines of the same
shape run the same requests, one after the other, in alternating order.

    python benchmarks/supervision_cost.py [CHECKPOINT] [--dp 2]
"""

from __future__ import annotations

import argparse
import time
from unittest.mock import patch

from common import median, table

from raycore import LLM, SamplingParams
from raycore.cluster.supervisor import Supervisor
from raycore.demo import demo_model_path, held_out_problems

AT_MOST = 1.02
SETTLES_S = 15.0
"""Time for standbys to start and become idle."""


class Unwatched(Supervisor):
    """Announces the ranks and then watches nothing."""

    def start(self) -> None:
        super().start()
        self.stop()


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(demo_model_path()), help="default: the bundled model")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    options = {"data_parallel_size": args.dp, "num_threads": 1, "use_tqdm_on_load": False}
    rates: dict[str, list[float]] = {"on": [], "off": []}
    with patch("raycore.running_engine.Supervisor", Unwatched):
        unwatched = LLM(args.checkpoint, **options)
    with unwatched, LLM(args.checkpoint, **options) as watched:
        engines = {"on": watched, "off": unwatched}
        time.sleep(SETTLES_S)
        for number in range(args.rounds + 1):
            for name in sorted(engines, reverse=bool(number % 2)):
                rate = tokens_per_s(engines[name])
                if number:  # the first round warms up
                    rates[name].append(rate)
    # ratios of neighbouring rounds, because the machine's speed drifts
    cost = median([off / on for on, off in zip(rates["on"], rates["off"], strict=True)])
    verdict = "held" if cost <= AT_MOST else "NOT HELD"
    rows: list[list[object]] = [["supervision", "tokens/s, median", "lowest", "highest"]]
    rows += [[name, f"{median(r):.0f}", f"{min(r):.0f}", f"{max(r):.0f}"] for name, r in rates.items()]
    print(table(rows))
    print(f"off / on, median of pairs: {cost:.3f}, at most {AT_MOST}: {verdict}")


def tokens_per_s(llm: LLM) -> float:
    """Output tokens per second of one batch."""
    prompts = [prompt for prompt, _ in held_out_problems(3, 128)]
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - started_s)


if __name__ == "__main__":
    main()
