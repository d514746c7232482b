"""Round trip of `collective_rpc` compared with vLLM's shared-memory MessageQueue: the same call, alternately.

    python benchmarks/executor_round_trip.py --peer-python PEER_ENVIRONMENT/bin/python

The argument has 2,000 bytes and every worker replies. Each round measures each wait mode and the peer, one after the
other, so that all run under the same conditions. The ratios are of the calls of all rounds. The last lines compare the
CPU time of an idle `LLM`'s engine and workers with that of as many idle Ray actors. Both include Ray's own threads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import ray

from placement.reserve import RankBundles
from raycore import LLM, SamplingParams
from raycore.cluster.local_ray.start import start_local_ray
from raycore.config import EngineConfig, resolve
from raycore.demo import demo_model_path
from raycore.executor.ray_executor import RayExecutor
from raycore.worker.rank import RankIdentity

ARGUMENT = b"x" * 2000
PEER_SETTLES_S = 1.5
"""The peer's readers spin for one second after their last message."""
WARM_UP_CALLS = 300
SETTLES_S = 4.0
"""Time without work after which a process counts as idle."""


class SizeWorker:
    """A worker that returns the size of its argument."""

    def __init__(self, config, rank):
        self.rank = rank.tp_rank

    def init_device(self):
        pass

    def load_model(self):
        pass

    def size(self, argument):
        return self.rank, len(argument)

    def shutdown(self):
        pass


@ray.remote(num_cpus=0)
class IdleActor:
    def pid(self):
        return os.getpid()


def make_config(num_workers: int, wait: str) -> EngineConfig:
    config = resolve(
        demo_model_path(), worker_cls="executor_round_trip.SizeWorker", executor_backend="ray", executor_wait=wait
    )
    parallel = msgspec.structs.replace(config.parallel, tensor_parallel_size=num_workers)
    return msgspec.structs.replace(config, parallel=parallel)


class Engine:
    """A `RayExecutor` in this process, with its placement group."""

    def __init__(self, num_workers: int, wait: str) -> None:
        self._group = ray.util.placement_group([{"CPU": 1}] * num_workers)
        ray.get(self._group.ready())
        bundles = RankBundles(self._group, range(num_workers))
        self.executor = RayExecutor(make_config(num_workers, wait), RankIdentity(0, num_workers), bundles)
        self.executor.initialize()

    def measure(self, num_calls: int) -> list[float]:
        seconds = []
        for _ in range(WARM_UP_CALLS + num_calls):
            start = time.perf_counter()
            self.executor.collective_rpc("size", args=(ARGUMENT,))
            seconds.append(time.perf_counter() - start)
        return seconds[WARM_UP_CALLS:]

    def close(self) -> None:
        self.executor.shutdown()
        ray.util.remove_placement_group(self._group)


class Peer:
    """vLLM's queue, in vLLM's environment."""

    def __init__(self, python: str, num_workers: int) -> None:
        script = Path(__file__).with_name("peer_queue.py")
        self._process = subprocess.Popen(
            [python, str(script), str(num_workers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        while self._line() != "ready":
            pass

    def measure(self, num_calls: int) -> list[float]:
        self._process.stdin.write(f"{WARM_UP_CALLS + num_calls}\n")
        self._process.stdin.flush()
        seconds = json.loads(self._line())[WARM_UP_CALLS:]
        time.sleep(PEER_SETTLES_S)
        return seconds

    def close(self) -> None:
        self._process.communicate("\n", timeout=30)

    def _line(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the peer exited with status {self._process.wait()}")
        return line.strip()


def percentile_us(seconds: list[float], percent: float) -> float:
    return sorted(seconds)[int(len(seconds) * percent / 100)] * 1e6


def compare(num_workers: int, options: argparse.Namespace) -> None:
    """Print one line for each wait mode, and one for the peer."""
    seconds: dict[str, list[float]] = defaultdict(list)
    peer = Peer(options.peer_python, num_workers) if options.peer_python else None
    for _ in range(options.rounds):
        for wait in ("spin", "adaptive"):
            engine = Engine(num_workers, wait)  # one at a time: spinning workers would disturb the others
            seconds[wait] += engine.measure(options.calls)
            engine.close()
        if peer is not None:
            seconds["vLLM"] += peer.measure(options.calls)
    if peer is not None:
        peer.close()
    for name, times in seconds.items():
        p50, p99 = percentile_us(times, 50), percentile_us(times, 99)
        line = f"{num_workers:7}  {name:9} {p50:8.1f} {p99:8.1f}"
        if peer is not None and name != "vLLM":
            line += f" {p50 / percentile_us(seconds['vLLM'], 50):9.2f} {p99 / percentile_us(seconds['vLLM'], 99):9.2f}"
        print(line, flush=True)


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of all threads of the processes so far."""
    total_ns = 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def idle_share(pids: list[int], seconds: float) -> float:
    """Cores that the processes use on average."""
    before = cpu_seconds(pids)
    time.sleep(seconds)
    return (cpu_seconds(pids) - before) / seconds


def print_idle(num_workers: int, seconds: float) -> None:
    actors = [IdleActor.remote() for _ in range(num_workers + 1)]
    pids = ray.get([actor.pid.remote() for actor in actors])
    time.sleep(SETTLES_S)
    ray_only = idle_share(pids, seconds)
    for actor in actors:
        ray.kill(actor)
    with LLM(demo_model_path(), tensor_parallel_size=num_workers, use_tqdm_on_load=False) as llm:
        llm.generate("1 + 2 =", SamplingParams(temperature=0), use_tqdm=False)
        (info,) = llm.engine_infos
        time.sleep(SETTLES_S)
        idle = idle_share([info.pid, *info.worker_pids], seconds)
    print(f"\nidle for {seconds:g} s, an engine and its {num_workers} workers: {idle:.2%} of one core")
    print(f"the same with {num_workers + 1} plain Ray actors: {ray_only:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="the interpreter that has vLLM; without it only raycore runs")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--calls", type=int, default=3000, help="calls in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    options = parser.parse_args()
    start_local_ray(max(options.workers) + 1, log_to_driver=False)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Ray {ray.__version__}; microseconds")
    print("workers  wait           p50      p99   p50/vLLM  p99/vLLM")
    for num_workers in options.workers:
        compare(num_workers, options)
    if options.idle_seconds:
        print_idle(max(options.workers), options.idle_seconds)
    ray.shutdown()


if __name__ == "__main__":
    main()
