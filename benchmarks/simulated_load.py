"""Compares what `raycore simulate` predicts with what an engine does: the same requests at the same times.

Steps are measured once (`raycore bench step-times`). Then each number of ranks serves three loads, which are shares of
what it can do according to the simulation, and the highest load once more while a rank is killed. Requests come at
random times, have random lengths, and are the same on both sides. They are sent by this process through AsyncLLM, so
that there is neither HTTP nor a tokenizer.

    python benchmarks/simulated_load.py                                the bundled model, 1 and 2 ranks
    python benchmarks/simulated_load.py --model DIR --loads 0.3 0.8    another one, and other loads

The pieces of a request are the medians of what it waits for its first step (queue), from there to its first token
(prefill), and for each further one (token), and of what a made token takes to its caller (stream), which isn't
simulated. `step` and `plan` are means of what the ranks' workers took for their steps and engines between two steps;
beside them stands what the simulation takes for the very same steps. Ranks, their engines and the caller share this
machine's cores, which the simulation doesn't know: `cpu` is the share of all cores that was busy. The machine must have
nothing else to do. The simulation is told how long after the kill requests moved, and when the replacement served, as
both depend on more than the model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import let_processes_import, table
from timed_worker import TimedStep

from raycore import AsyncLLM, SamplingParams
from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.outputs import RequestOutput
from raycore.simulation.deployment import Kill, Prompts
from raycore.simulation.outcome import Outcome, RequestOutcome
from raycore.simulation.planning import Scenario, simulate
from raycore.simulation.step_times import MeasuredTimes, read_step_times
from raycore.simulation.traces import TracedRequest

PIECES = ("ttft", "queue", "prefill", "plan", "step", "token", "stream", "e2el")
RANK_STATE_S = 0.02
"""How often the state of ranks is looked at after a kill."""


@dataclass
class Served:
    """What a caller has seen."""

    requests: list[RequestOutcome] = field(default_factory=list[RequestOutcome])
    streams_s: list[float] = field(default_factory=list[float])
    """For each update, how long after its newest token was made it came."""
    steps: list[list[TimedStep]] = field(default_factory=list[list[TimedStep]])
    """Of each worker."""
    busy: float = 0.0
    """Share of all cores that was busy."""
    killed_s: float | None = None
    detected_s: float = 0.0
    """From the kill until the engine no longer lists the rank. Its requests move then."""
    replaced_s: float = 0.0
    """From the kill until the replacement served."""


def random_trace(per_s: float, seconds: float, args: argparse.Namespace) -> list[TracedRequest]:
    """Requests that come at random times, `per_s` in a second."""
    draw = random.Random(args.seed)
    trace: list[TracedRequest] = []
    at_s = 0.0
    while at_s < seconds:
        num_prompt = draw.randint(args.prompt_tokens // 2, args.prompt_tokens * 3 // 2)
        num_output = draw.randint(max(1, args.new_tokens // 2), args.new_tokens * 3 // 2)
        trace.append(TracedRequest(at_s, num_prompt, num_output))
        at_s += draw.expovariate(per_s)
    return trace


def predict(args: argparse.Namespace, num_ranks: int, times: MeasuredTimes, scenario: Scenario) -> Outcome:
    """What the simulation says."""
    (found,) = simulate({**options_of(args), "data_parallel_size": num_ranks}, {}, replace(scenario, measured=times))
    return found.outcome


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options."""
    return {
        "model": args.model,
        "dtype": args.dtype,
        "num_threads": args.num_threads,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
    }


async def serve(llm: AsyncLLM, trace: list[TracedRequest], vocab_size: int, kill_s: float | None = None) -> Served:
    """Send the requests of a trace at their times. `kill_s`: when rank 0 is killed."""
    served = Served(requests=[RequestOutcome(each.arrival_s, each.num_prompt) for each in trace])
    prompts = Prompts(vocab_size)
    tokens = [prompts.tokens(index, request) for index, request in enumerate(trace)]
    began_s, before = time.monotonic(), _cpu_s()

    async def call(index: int) -> None:
        request, outcome = trace[index], served.requests[index]
        await asyncio.sleep(began_s + request.arrival_s - time.monotonic())
        outcome.arrival_s = time.monotonic() - began_s
        params = SamplingParams(max_tokens=request.num_output, temperature=0.0, ignore_eos=True, detokenize=False)
        output: RequestOutput | None = None
        async for output in llm.generate({"prompt_token_ids": tokens[index]}, params):
            if output.metrics is not None and output.metrics.last_token_s is not None:
                served.streams_s.append(time.monotonic() - output.metrics.last_token_s)
        assert output is not None
        assert output.metrics is not None
        metrics = output.metrics
        outcome.queue_s = metrics.queue_s
        outcome.first_token_s = _since(began_s, metrics.first_token_s)
        outcome.last_token_s = _since(began_s, metrics.last_token_s)
        outcome.num_output = len(output.outputs[0].token_ids)

    killing = None if kill_s is None else asyncio.ensure_future(_kill(llm, served, began_s, kill_s))
    await asyncio.gather(*map(call, range(len(trace))))
    after = _cpu_s()
    served.busy = (after[0] - before[0]) / (after[1] - before[1])
    if killing is not None:
        await killing
    served.steps = await llm.collective_rpc("take_timed_steps")
    return served


def _since(began_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else at_s - began_s


async def _kill(llm: AsyncLLM, served: Served, began_s: float, kill_s: float) -> None:
    """Kill rank 0, and note when its replacement serves."""
    await asyncio.sleep(began_s + kill_s - time.monotonic())
    (killed,) = [info for info in llm.engine_infos if info.dp_rank == 0]
    served.killed_s = time.monotonic() - began_s
    os.kill(killed.pid, signal.SIGKILL)
    while True:
        await asyncio.sleep(RANK_STATE_S)
        since_s = time.monotonic() - began_s - served.killed_s
        now = [info for info in llm.engine_infos if info.dp_rank == 0]
        if not served.detected_s and killed.pid not in [info.pid for info in now]:
            served.detected_s = since_s
        if now and now[0].pid != killed.pid:
            served.replaced_s = since_s
            return


def _cpu_s() -> tuple[float, float]:
    """Seconds in which cores were busy, and all of their seconds."""
    first = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    ticks = [int(each) for each in first]
    whole = sum(ticks)
    return float(whole - ticks[3] - ticks[4]), float(whole)


def pieces(requests: list[RequestOutcome], streams_s: list[float] | None = None) -> dict[str, float]:
    """Medians of requests, in seconds."""
    columns: dict[str, list[float]] = {"ttft": [], "queue": [], "prefill": [], "token": [], "e2el": []}
    for each in requests:
        assert each.ttft_s is not None, "all requests get tokens"
        assert each.e2el_s is not None
        queue_s = each.queue_s or 0.0
        columns["ttft"].append(each.ttft_s)
        columns["queue"].append(queue_s)
        columns["prefill"].append(each.ttft_s - queue_s)
        columns["e2el"].append(each.e2el_s)
        if each.tpot_s is not None:
            columns["token"].append(each.tpot_s)
    found = {name: float(np.median(values)) for name, values in columns.items()}
    if streams_s:
        found["stream"] = float(np.median(streams_s))
    return found


def of_steps(steps: list[list[TimedStep]], times: MeasuredTimes | None = None) -> dict[str, float]:
    """Means of steps and of what lies between them, in seconds: as they were, or as `times` has them.

    A step with decodes follows one that ended just before it. Others may have waited for requests.
    """
    took_s: list[float] = []
    between_s: list[float] = []
    for rank in steps:
        for before, step in zip([None, *rank], rank, strict=False):
            took_s.append(times.step_s(step.shape) if times else step.ended_s - step.begun_s)
            if before is not None and step.shape.num_decodes:
                num_sequences = step.shape.num_prompts + step.shape.num_decodes
                planned_s = times.engine_s(num_sequences, step.num_new) if times else step.begun_s - before.ended_s
                between_s.append(planned_s)
    return {"plan": float(np.mean(between_s)), "step": float(np.mean(took_s))}


def throughput(requests: list[RequestOutcome]) -> float:
    """Tokens of outputs a second, from the first arrival to the last token."""
    return sum(each.num_output for each in requests) / max(each.last_token_s or 0.0 for each in requests)


def rows_of(name: str, served: list[Served], predicted: list[Outcome], times: MeasuredTimes) -> list[list[str]]:
    """The lines of a load: what was served, what was predicted, and how much more was predicted. Medians of rounds."""
    real = _medians(
        [
            {"tokens/s": throughput(each.requests), **pieces(each.requests, each.streams_s), **of_steps(each.steps)}
            for each in served
        ]
    )
    said = _medians(
        [
            {"tokens/s": throughput(each.done), **pieces(each.done), **of_steps(its.steps, times)}
            for each, its in zip(predicted, served, strict=True)
        ]
    )

    def line(what: str, figures: dict[str, float], busy: str) -> list[str]:
        seconds = [f"{figures[each] * 1e3:.2f}" if each in figures else "" for each in PIECES]
        return [name, what, f"{figures['tokens/s']:.0f}", *seconds, busy]

    ratios = [f"{said[each] / real[each] - 1:+.0%}" if each in said and real[each] > 0 else "" for each in PIECES]
    busy = float(np.median([each.busy for each in served]))
    return [
        line("served", real, f"{busy:.0%}"),
        line("simulated", said, ""),
        [name, "difference", f"{said['tokens/s'] / real['tokens/s'] - 1:+.1%}", *ratios, ""],
    ]


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.median([each[name] for each in rounds])) for name in rounds[0]}


async def compare(args: argparse.Namespace, num_ranks: int, times: MeasuredTimes) -> list[list[str]]:
    """All loads of so many ranks. The engine serves them one after the other, `--rounds` times."""
    # what comes at once shows how much the ranks can do
    burst = [TracedRequest(0.0, each.num_prompt, each.num_output) for each in random_trace(20.0, args.seconds, args)]
    most_per_s = predict(args, num_ranks, times, Scenario(burst)).figures()["requests_per_s"]
    loads = [(f"{share:.0%}", share, False) for share in args.loads]
    loads.append((f"{max(args.loads):.0%}, kill", max(args.loads), True))
    vocab_size = resolve(**options_of(args)).model.spec.vocab_size
    served: dict[str, list[Served]] = {}
    predicted: dict[str, list[Outcome]] = {}
    llm = AsyncLLM(
        **options_of(args),
        data_parallel_size=num_ranks,
        skip_tokenizer_init=True,
        worker_cls="timed_worker.TimedWorker",
    )
    try:
        await serve(llm, burst[: 4 * num_ranks], vocab_size)  # the first steps are slower
        for _ in range(args.rounds):
            for name, share, is_killed in loads:
                trace = random_trace(share * most_per_s, args.seconds, args)
                kill_s = args.seconds / 3 if is_killed else None
                await llm.reset_prefix_cache()
                one = await serve(llm, trace, vocab_size, kill_s)
                # requests came when this process got to it
                trace = [replace(each, arrival_s=its.arrival_s) for each, its in zip(trace, one.requests, strict=True)]
                scenario = Scenario(trace)
                if one.killed_s is not None:
                    kill = Kill(0, one.killed_s)
                    scenario = Scenario(trace, kills=[kill], detection_s=one.detected_s, replacement_s=one.replaced_s)
                    print(
                        f"{num_ranks} ranks, {name}: requests moved after {one.detected_s:.2f} s, and the replacement "
                        f"served after {one.replaced_s:.2f} s",
                        file=sys.stderr,
                    )
                served.setdefault(name, []).append(one)
                predicted.setdefault(name, []).append(predict(args, num_ranks, times, scenario))
    finally:
        llm.shutdown()
    return [[str(num_ranks), *row] for name in served for row in rows_of(name, served[name], predicted[name], times)]


def measured(args: argparse.Namespace) -> MeasuredTimes:
    """Measure steps in a process of its own."""
    if args.step_times is not None:
        return read_step_times(args.step_times)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "steps.json")
        command = [sys.executable, "-m", "raycore", "bench", "step-times", "--output", str(path)]
        for name, value in options_of(args).items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        subprocess.run(command, check=True, timeout=900)
        return read_step_times(path)


def main() -> None:
    """Measure, serve, simulate, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=demo_model_path())
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.55, 0.8])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--step-times", help="a measurement that there is already")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    times = measured(args)
    rows = [["ranks", "load", "", "tokens/s", "ttft ms", *PIECES[1:], "cpu"]]
    let_processes_import(Path(__file__).parent)  # workers need `timed_worker`
    for num_ranks in args.ranks:
        rows += asyncio.run(compare(args, num_ranks, times))
    print(table(rows))


if __name__ == "__main__":
    main()
