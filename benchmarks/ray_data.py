"""Runs a dataset through Ray Data: while ranks are killed, and against `LLM.generate` of the same rows.

First two ranks are killed (SIGKILL) while the rows run. Each row has to come once, with the outputs of a run that
nothing disturbs. Then `LLM.generate` and undisturbed pipelines take turns, each with an engine of its own, with as many
ranks in the same Ray. The time of a pipeline is that from the first request that its engine gets to the last row that
this program receives; that of `LLM.generate` is the call's. The wall time of a pipeline has its engine's start, too.
Its steady rate is that of the rows between the first and the last tenth: the others are those while Ray Data's own
processes start, and while the last batches leave ranks idle. The more rows, the less these count. Runs of few rows,
which the engine has all at once, have no steady rate.

    python benchmarks/ray_data.py                               20,000 rows on 2 ranks, with the bundled model
    python benchmarks/ray_data.py --model DIR --rounds 3

The exit status is 1 if a row is lost, comes twice or differs, or if the ratio is below `--min-ratio`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from common import median, table

from raycore import LLM, SamplingParams
from raycore.data import Processor, ProcessorConfig, build_processor
from raycore.demo import demo_model_path
from raycore.node.processes import is_running

MAX_MODEL_LEN = 256


def prompt_of(index: int) -> str:
    """The prompt of a row."""
    return f"{10 + index % 90} + {10 + index // 90 % 90} ="


def processor_of(args: argparse.Namespace) -> Processor:
    """The pipeline's."""
    params = sampling_params(args)
    options = {"max_model_len": MAX_MODEL_LEN}
    config = ProcessorConfig(
        model_source=args.model, concurrency=args.ranks, batch_size=args.batch_size, engine_kwargs=options
    )

    def before(row: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": prompt_of(row["id"]), "sampling_params": params}

    def after(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "tokens": row["generated_tokens"], "arrival": row["metrics"]["arrival_time"]}

    return build_processor(config, before, after)


def sampling_params(args: argparse.Namespace) -> dict[str, Any]:
    """Greedy ones, all of the same length."""
    return {"temperature": 0.0, "max_tokens": args.tokens, "ignore_eos": True}


class Pipeline(NamedTuple):
    """A run of all rows through a pipeline."""

    rows: list[dict[str, Any]]
    duration_s: float
    wall_s: float
    steady_rate: float
    """Rows a second, between the first and the last tenth."""


def run_pipeline(args: argparse.Namespace, look: Callable[[int], object]) -> Pipeline:
    """Run all rows. `look` is called with the number of rows so far."""
    began_s = time.time()
    rows: list[dict[str, Any]] = []
    came_s: list[float] = []
    for row in processor_of(args)(ray.data.range(args.rows)).iter_rows():
        rows.append(row)
        came_s.append(time.time())
        look(len(rows))
    ended_s, tenth = time.time(), len(rows) // 10
    rate = 8 * tenth / (came_s[9 * tenth - 1] - came_s[tenth - 1])
    return Pipeline(rows, ended_s - min(row["arrival"] for row in rows), ended_s - began_s, rate)


def run_generate(args: argparse.Namespace) -> tuple[list[list[int]], float]:
    """The same rows in one call. Returns their tokens, and the time."""
    params = SamplingParams(**sampling_params(args))
    prompts = [prompt_of(index) for index in range(args.rows)]
    options: dict[str, Any] = {"data_parallel_size": args.ranks, "max_model_len": MAX_MODEL_LEN}
    with LLM(args.model, **options) as llm:
        began_s = time.time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], time.time() - began_s


class Killer:
    """Kills processes of ranks when certain numbers of rows have come."""

    def __init__(self, moments: list[int]) -> None:
        self._moments = moments
        self.killed: list[int] = []

    def look(self, num_rows: int) -> None:
        """Kill the process of a rank if it is time to."""
        if len(self.killed) < len(self._moments) and num_rows >= self._moments[len(self.killed)]:
            pids = [pid for pid in rank_pids() if pid not in self.killed and is_running(pid)]
            if pids:
                os.kill(pids[0], signal.SIGKILL)
                self.killed.append(pids[0])


def rank_pids() -> list[int]:
    """The processes of the living ranks. They are on this machine."""
    from ray._private.state import actors

    found = [each for each in actors().values() if each["ActorClassName"] == "DPEngineCoreActor"]
    return [each["Pid"] for each in found if each["State"] == "ALIVE" and "dp" in each["Name"]]


def tokens_by_id(rows: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The outputs of rows."""
    return {row["id"]: list(row["tokens"]) for row in rows}


def has_steady_rate(args: argparse.Namespace) -> bool:
    """Whether there are several times as many rows as the engine has at a time."""
    config = processor_of(args).config
    return args.rows >= 4 * config.num_batches * config.batch_size


def _row(run: str, num_rows: int, duration_s: float, wall_s: str = "", steady: str = "") -> list[str]:
    return [run, f"{duration_s:.1f}", wall_s, f"{num_rows / duration_s:.0f}", steady]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=demo_model_path())
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--min-ratio", type=float, default=0.95)
    args = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False

    killer = Killer([(number + 1) * args.rows // (args.kills + 1) for number in range(args.kills)])
    disturbed = run_pipeline(args, killer.look)
    seen = Counter(row["id"] for row in disturbed.rows)
    results = [
        ["run", "seconds", "wall seconds", "rows/s", "steady"],
        _row(f"{len(killer.killed)} ranks killed", args.rows, disturbed.duration_s),
    ]
    generated: list[float] = []
    piped: list[float] = []
    steady: list[float] = []
    num_different = 0
    for _ in range(args.rounds):
        expected, generate_s = run_generate(args)
        run = run_pipeline(args, lambda count: None)
        generated.append(generate_s)
        piped.append(run.duration_s)
        steady.append(run.steady_rate)
        results.append(_row("LLM.generate", args.rows, generate_s))
        rate = f"{run.steady_rate:.0f}" if has_steady_rate(args) else "-"
        results.append(_row("pipeline", args.rows, run.duration_s, f"{run.wall_s:.1f}", rate))
        by_id = tokens_by_id(run.rows)
        num_different += sum(by_id.get(index) != tokens for index, tokens in enumerate(expected))
        disturbed_by_id = tokens_by_id(disturbed.rows)
        num_different += sum(disturbed_by_id.get(index) != tokens for index, tokens in by_id.items())
    num_lost, num_twice = args.rows - len(seen), sum(count > 1 for count in seen.values())
    print(table(results))
    print(f"{args.rows} rows with kills: {num_lost} lost, {num_twice} more than once; {num_different} outputs differ")
    if args.rounds:
        ratio = median(generated) / median(piped)
        print(f"throughput of the pipeline, relative to LLM.generate (medians): {ratio:.3f}")
        if has_steady_rate(args):
            print(f"its steady rate, relative to LLM.generate: {median(steady) * median(generated) / args.rows:.3f}")
        if ratio < args.min_ratio:
            sys.exit(1)
    if num_lost or num_twice or num_different or len(killer.killed) < args.kills:
        sys.exit(1)


if __name__ == "__main__":
    main()
