"""Breaks ranks at random while requests run, and reports lost requests, changed results, and recovery times.

Mixed requests (greedy and seeded, streaming and not, some with log probabilities, stop strings or n=2) run once
undisturbed, and once while engines and workers are killed (SIGKILL), stopped (SIGSTOP) or made to raise, and whole
nodes are removed. Every request has to finish with the result of the undisturbed run. The cluster has several nodes on
this machine: a head for this program, and a few more nodes than ranks.

    python benchmarks/chaos.py                          500 requests at DP 2, then at DP 3
    python benchmarks/chaos.py --one-node               only kill processes, all on one node
    python benchmarks/chaos.py --no-batch-invariant     results may differ by rounding
    python benchmarks/chaos.py --stages 2               ranks with two pipeline stages, each of which breaks

Without batch invariance, the last bits of a token's logits depend on what else is in its step, so a different token may
win where the best two are nearly tied. If a greedy result has a different token, the undisturbed run's logits of the
two tokens are compared. Sampled results that differ are only counted, because they also depend on random noise.

The exit status is 1 if a request was lost, a result differs by more than rounding allows, a rank stays broken, or
anything is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import shared_memory
from common import fail_next_step, median, table

from raycore import AsyncLLM, SamplingParams
from raycore.demo import demo_model_path, held_out_problems
from raycore.engine.rank_events import RanksLost, RankUp
from raycore.node.processes import is_running

ROUNDING = 1e-3
"""Without batch invariance, tokens whose logits are closer than this may swap. The error in float32 is far smaller."""
STEP_TIMEOUT_S = 2.0
RECOVERY_S = 120.0
"""Seconds within which all ranks have to serve again at the end."""


def fault_kinds(num_stages: int) -> list[str]:
    """The kinds of faults. A worker of each stage is a kind of its own."""
    workers = ["worker"] if num_stages == 1 else [f"worker of stage {stage}" for stage in range(num_stages)]
    both = [f"{act} {process}" for act in ("kill", "stop") for process in ("engine", *workers)]
    return [*both, "raise in a step", "remove node"]


def is_told_at_once(kind: str) -> bool:
    """Whether Ray says at once that a process has ended."""
    return kind.startswith("kill")


@dataclass
class Fault:
    kind: str
    dp_rank: int
    injected_s: float
    detected_s: float | None = None
    serving_s: float | None = None
    num_outputs: dict[str, int] = field(default_factory=dict)
    """How many outputs each stream on the rank had before the fault, by request id."""
    pauses_s: list[float] = field(default_factory=list)
    """Pauses of the streams on the rank, if another rank was serving."""


@dataclass
class Stream:
    """The outputs of a streaming request."""

    times_s: list[float] = field(default_factory=list)
    dp_rank: int | None = None
    """The rank of the latest output."""


@dataclass
class Result:
    token_ids: list[list[int]]
    texts: list[str]
    logprobs: list[Any]
    reasons: list[Any]

    @staticmethod
    def of(output) -> Result:
        parts = output.outputs
        return Result(
            [part.token_ids for part in parts],
            [part.text for part in parts],
            [part.logprobs for part in parts],
            [(part.finish_reason, part.stop_reason) for part in parts],
        )


@dataclass
class Comparison:
    """Compares the disturbed run's results with those of the undisturbed run."""

    batch_invariant: bool
    num_results: int = 0
    lost: list[BaseException] = field(default_factory=list)
    num_greedy: int = 0
    """Greedy requests whose results differ."""
    num_sampled: int = 0
    """Sampled requests whose results differ."""
    greedy_gaps: list[float] = field(default_factory=list)
    """One for each greedy result that differs: see `gap_where_they_part`. Empty with batch invariance."""

    def add(self, result: Result | BaseException, reference: Result, params: SamplingParams) -> None:
        """Compare two results. Without batch invariance, only their tokens: log probabilities may differ."""
        self.num_results += 1
        if not isinstance(result, Result):
            self.lost.append(result)
        elif result == reference or (not self.batch_invariant and result.token_ids == reference.token_ids):
            return
        elif params.temperature > 0:
            self.num_sampled += 1
        else:
            self.num_greedy += 1
            if not self.batch_invariant:
                self.greedy_gaps.append(gap_where_they_part(result, reference))

    def is_good(self) -> bool:
        """Whether no request was lost and no result differs by more than allowed."""
        differs = max(self.greedy_gaps, default=0.0) > ROUNDING
        if self.batch_invariant:
            differs = self.num_sampled + self.num_greedy > 0
        return not self.lost and not differs

    def rows(self) -> list[list[object]]:
        """Rows of the report."""
        differing = f"{self.num_greedy + self.num_sampled} of {self.num_results}"
        rows: list[list[object]] = [["requests lost", len(self.lost)], ["results that differ", differing]]
        if not self.batch_invariant:
            gaps = "none"
            if self.greedy_gaps:
                gaps = f"{median(self.greedy_gaps):.1e}, {max(self.greedy_gaps):.1e}"
            rows[-1][1] = f"{differing}: {self.num_greedy} greedy, {self.num_sampled} sampled"
            rows.append(["gap of the top two logits at a greedy result's first difference: median, max", gaps])
        return rows


def gap_where_they_part(result: Result, reference: Result) -> float:
    """The undisturbed run's logit of its own token minus that of the disturbed run's token, at the first difference.

    Infinite if the disturbed run's token is not among the undisturbed run's best two.
    """
    (ours,), (theirs,), (logprobs,) = result.token_ids, reference.token_ids, reference.logprobs
    position = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if position is None or ours[position] not in logprobs[position]:
        return math.inf
    return logprobs[position][theirs[position]].logprob - logprobs[position][ours[position]].logprob


def make_requests(count: int, seed: int, all_logprobs: bool) -> list[tuple[str, SamplingParams, bool]]:
    """(prompt, parameters, whether it streams) of each request. All, or some, request the two most likely tokens."""
    rnd = random.Random(seed)
    problems = [prompt for prompt, _ in held_out_problems(3, 200)]
    requests = []
    for i in range(count):
        shots = "".join(f"{a} + {a} = {2 * a}\n" for a in rnd.sample(range(99), rnd.randrange(9)))
        params: dict[str, Any] = {"max_tokens": rnd.randrange(60, 400), "ignore_eos": True}
        params |= {"temperature": 0.0} if rnd.random() < 0.5 else {"temperature": 0.9, "seed": i, "top_p": 0.95}
        if rnd.random() < 0.3 or all_logprobs:
            params["logprobs"] = 2
        if rnd.random() < 0.2:
            params["stop"] = ["7 7", "99", "\n5"]
        if "seed" in params and rnd.random() < 0.2:
            params["n"] = 2
        requests.append((shots + rnd.choice(problems), SamplingParams(**params), rnd.random() < 0.6))
    return requests


class OneNode:
    """A local Ray with one node."""

    def __init__(self, num_ranks: int, num_stages: int) -> None:
        import ray

        num_cpus = num_ranks * (1 + num_stages)  # a rank has an engine and a worker of each stage
        options = {"object_store_memory": 200 << 20, "include_dashboard": False, "logging_level": logging.ERROR}
        ray.init(address="local", num_cpus=num_cpus, log_to_driver=False, **options)
        self.ray = ray
        self.kinds = [kind for kind in fault_kinds(num_stages) if is_told_at_once(kind)]

    def close(self) -> None:
        self.ray.shutdown()


class Nodes:
    """A cluster with several nodes on this machine. Nodes can be removed."""

    def __init__(self, num_ranks: int, num_stages: int, num_spare: int) -> None:
        """`num_spare`: nodes in addition to one per rank, which can be removed."""
        import ray
        from ray.cluster_utils import Cluster

        self.num_needed = num_ranks
        self._kinds = fault_kinds(num_stages)
        options = {"object_store_memory": 100 << 20, "include_dashboard": False}
        self._options = options | {"num_cpus": 1 + num_stages}
        self.cluster = Cluster(initialize_head=True, head_node_args=options | {"num_cpus": 0})
        self.nodes = [self.cluster.add_node(**self._options) for _ in range(num_ranks + num_spare)]
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        self.ray = ray

    @property
    def kinds(self) -> list[str]:
        """The kinds of faults that can be injected now."""
        return [kind for kind in self._kinds if kind != "remove node" or len(self.nodes) > self.num_needed]

    def remove(self, node_id: str) -> None:
        """Crash a node."""
        node = next(node for node in self.nodes if node.node_id == node_id)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self.ray.shutdown()
        self.cluster.shutdown()


class Observer:
    """Records when ranks are found lost and serve again, and when streams get output."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.faults: list[Fault] = []
        self.streams: dict[str, Stream] = {}
        llm.trace_requests()  # so that each output says which rank it comes from
        self._clients = llm.clients
        note = self._clients.on_rank_event

        def on_rank_event(event):
            if isinstance(event, RanksLost):
                now_s = time.monotonic()
                for fault in itertools.chain(*map(self._open, event.dp_ranks)):
                    fault.detected_s = fault.detected_s or now_s
            note(event)
            if isinstance(event, RankUp):
                for fault in self._open(event.dp_rank):
                    fault.serving_s = time.monotonic()

        self._clients.on_rank_event = on_rank_event

    def _open(self, dp_rank: int) -> list[Fault]:
        return [fault for fault in self.faults if fault.dp_rank == dp_rank and fault.serving_s is None]

    def is_whole(self) -> bool:
        """Whether every broken rank serves again."""
        return all(fault.serving_s is not None for fault in self.faults)

    def serving(self) -> list[int]:
        """Ranks that are serving."""
        broken = {fault.dp_rank for fault in self.faults if fault.serving_s is None}
        return [rank for rank in self._clients.links() if rank not in broken]

    def num_outputs_on(self, dp_rank: int) -> dict[str, int]:
        """How many outputs each stream on this rank has, by request id. Includes streams that have finished."""
        # a copy: the event loop's thread adds streams
        streams = list(self.streams.items())
        return {request_id: len(stream.times_s) for request_id, stream in streams if stream.dp_rank == dp_rank}


async def run_all(
    llm: AsyncLLM, requests, concurrency: int, streams: dict[str, Stream], first_id: int = 0
) -> list[Any]:
    """The result of each request, or its error."""
    gate = asyncio.Semaphore(concurrency)
    results: list[Any] = [None] * len(requests)

    async def one(index: int) -> None:
        prompt, params, is_stream = requests[index]
        request_id = f"request-{first_id + index}"
        async with gate:
            try:
                last = None
                async for output in llm.generate(prompt, params, request_id):
                    last = output
                    if is_stream:
                        stream = streams.setdefault(request_id, Stream())
                        stream.times_s.append(time.monotonic())
                        stream.dp_rank = None if output.trace is None else output.trace.dp_rank
                results[index] = Result.of(last)
            except Exception as error:
                results[index] = error

    await asyncio.gather(*(one(index) for index in range(len(requests))))
    return results


async def inject(llm: AsyncLLM, nodes: Nodes | OneNode, observer: Observer, interval_s: float, seed: int) -> None:
    """Inject faults until cancelled. Each breaks a serving rank while another one is serving."""
    rnd = random.Random(seed)
    kinds: list[str] = []
    while True:
        await asyncio.sleep(rnd.expovariate(1 / interval_s))
        serving = observer.serving()
        if len(serving) < 2:
            continue  # never the last one: pauses measure how fast another rank takes over, not how fast one starts
        if not kinds:
            kinds = rnd.sample(nodes.kinds, len(nodes.kinds))
        dp_rank = rnd.choice(serving)
        await asyncio.to_thread(break_rank, llm, nodes, observer, kinds.pop(), dp_rank)


def break_rank(llm: AsyncLLM, nodes: Nodes | OneNode, observer: Observer, kind: str, dp_rank: int) -> None:
    info = next(info for info in llm.engine_infos if info.dp_rank == dp_rank)
    fault = Fault(kind, dp_rank, time.monotonic(), num_outputs=observer.num_outputs_on(dp_rank))
    observer.faults.append(fault)
    process, _, stage = kind.partition(" of stage ")
    pid = info.worker_pids[int(stage or 0)] if process.endswith("worker") else info.pid
    if kind.startswith("kill"):
        os.kill(pid, signal.SIGKILL)
    elif kind.startswith("stop"):
        os.kill(pid, signal.SIGSTOP)
    elif kind == "raise in a step":
        fail_next_step(llm, dp_rank)
    else:
        assert isinstance(nodes, Nodes)
        nodes.remove(info.node_id)


def note_pauses(observer: Observer) -> None:
    for fault in observer.faults:
        for request_id, count in fault.num_outputs.items():
            times_s = observer.streams[request_id].times_s
            if count < len(times_s):
                fault.pauses_s.append(times_s[count] - times_s[count - 1])


def percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))] if values else float("nan")


def run(dp: int, args: argparse.Namespace) -> bool:
    shared_before = shared_memory.files()
    nodes = OneNode(dp, args.stages) if args.one_node else Nodes(dp, args.stages, args.spare_nodes)
    started_s = time.monotonic()
    options = {"batch_invariant": True} if args.batch_invariant else {}
    llm = AsyncLLM(
        args.model,
        dtype=args.dtype,
        data_parallel_size=dp,
        pipeline_parallel_size=args.stages,
        executor_backend="ray",
        num_threads=1,
        max_model_len=512,
        max_num_seqs=64,
        step_timeout_s=STEP_TIMEOUT_S,
        restart_backoff_s=0.05,
        standby_delay_s=0.0,
        max_request_replays=1000,
        max_rank_restarts=1000,
        use_tqdm_on_load=False,
        **options,
    )
    cold_start_s = time.monotonic() - started_s
    requests = make_requests(args.requests, args.seed, all_logprobs=not args.batch_invariant)
    expected = asyncio.run(run_all(llm, requests, args.concurrency, {}))
    observer = Observer(llm)
    pids = {pid for info in llm.engine_infos for pid in (info.pid, *info.worker_pids)}

    comparison = Comparison(args.batch_invariant)

    async def run_first(count: int) -> None:
        first_id = comparison.num_results
        results = await run_all(llm, requests[:count], args.concurrency, observer.streams, first_id)
        for result, reference, (_, params, _) in zip(results, expected, requests, strict=False):
            comparison.add(result, reference, params)

    async def disturbed() -> None:
        injector = asyncio.create_task(inject(llm, nodes, observer, args.fault_interval_s, args.seed))
        try:
            while not comparison.num_results or len(observer.faults) < args.min_faults:
                await run_first(len(requests))
        finally:
            injector.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await injector

    async def recover() -> None:
        deadline_s = time.monotonic() + RECOVERY_S
        while not observer.is_whole() and time.monotonic() < deadline_s:
            await run_first(args.concurrency)  # a stopped process is detected only while its rank has requests

    started_s = time.monotonic()
    asyncio.run(asyncio.wait_for(disturbed(), args.timeout_s))
    elapsed_s = time.monotonic() - started_s
    asyncio.run(asyncio.wait_for(recover(), args.timeout_s))
    pids |= {pid for info in llm.engine_infos for pid in (info.pid, *info.worker_pids)}
    llm.shutdown()
    left = leftovers(nodes, pids)
    nodes.close()
    left += shared_memory.abandoned_since(shared_before)
    note_pauses(observer)
    return report(dp, observer, comparison, cold_start_s, elapsed_s, left)


def leftovers(nodes: Nodes | OneNode, pids: set[int]) -> list[str]:
    ray = nodes.ray
    deadline_s = time.monotonic() + 10
    while True:
        left = [f"process {pid}" for pid in pids if is_running(pid)]
        left += [f"actor {name}" for name in ray.util.list_named_actors() if name.startswith("raycore")]
        groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        left += [f"placement group {group['name']}" for group in groups]
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.05)  # Ray's tables lag behind its processes


def report(dp, observer, comparison: Comparison, cold_start_s, elapsed_s, left) -> bool:
    faults = observer.faults
    kinds = Counter(fault.kind for fault in faults)
    detections = [f.detected_s - f.injected_s for f in faults if f.detected_s and is_told_at_once(f.kind)]
    serving = [f.serving_s - f.injected_s for f in faults if f.serving_s]
    killed = [f.serving_s - f.injected_s for f in faults if f.serving_s and is_told_at_once(f.kind)]
    pauses = [pause for fault in faults for pause in fault.pauses_s]
    killed_pauses = [pause for fault in faults if is_told_at_once(fault.kind) for pause in fault.pauses_s]
    gaps = [b - a for stream in observer.streams.values() for a, b in itertools.pairwise(stream.times_s)]
    rows = [
        ["", f"DP {dp}"],
        ["requests", comparison.num_results],
        ["seconds, disturbed", f"{elapsed_s:.1f}"],
        ["faults injected", f"{len(faults)}: " + ", ".join(f"{count} x {kind}" for kind, count in kinds.items())],
        *comparison.rows(),
        ["longest pause of a stream, s", f"{max(gaps, default=0):.2f}"],
        ["pause of streams on a killed rank, s: p50, p99", both(killed_pauses)],
        ["pause of streams on any broken rank, s: p50, p99", both(pauses)],
        ["killed process to detection, ms: p50, p99", both([1000 * value for value in detections], 1)],
        ["fault to the rank serving again, s: p50, p99", both(serving)],
        ["the same, killed processes only", both(killed)],
        ["cold start of all ranks, s", f"{cold_start_s:.2f}"],
        ["left behind", ", ".join(left) or "nothing"],
    ]
    print(table(rows), flush=True)
    for error in comparison.lost[:3]:
        print(f"lost: {type(error).__name__}: {error}")
    return comparison.is_good() and observer.is_whole() and not left


def both(values: list[float], digits: int = 2) -> str:
    return f"{percentile(values, 50):.{digits}f}, {percentile(values, 99):.{digits}f}  (of {len(values)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo_model_path()))
    parser.add_argument("--dp", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--stages", type=int, default=1, help="number of pipeline stages of a rank")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--fault-interval-s", type=float, default=3.0, help="mean time between faults")
    parser.add_argument("--min-faults", type=int, default=0, help="repeat requests until this many faults occurred")
    parser.add_argument("--spare-nodes", type=int, default=3, help="nodes in addition to one per rank")
    parser.add_argument("--one-node", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=900.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    os.environ.setdefault("RAY_worker_niceness", "0")
    is_whole = [run(dp, args) for dp in args.dp]
    sys.exit(not all(is_whole))


if __name__ == "__main__":
    main()
