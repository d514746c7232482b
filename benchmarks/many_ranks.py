"""What the control plane of many ranks costs: CPU time by process, messages, threads, and calls of Ray's control store.

The real client, API servers, supervisor and manager run in the simulated cluster of `tests/simulation`, in virtual
time. Ranks answer all tokens of a request at once, and have no model. A profiler's samples go to the simulated process
that runs; those in the simulation's own code are left out. What Ray itself costs isn't in the figures.

    python benchmarks/many_ranks.py                                1, 16, 256 and 1,024 ranks, 16 API servers
    python benchmarks/many_ranks.py --ranks 256 --profile          and the functions that cost most, by phase

Phases: `start`, until all ranks and API servers are up; `idle`, virtual seconds without requests; `load`, in which each
API server keeps so many requests running; `loss`, in which the processes of one node's ranks are killed under load.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

NUM_TOKENS = 8
"""Tokens of an answer."""
RANKS_PER_NODE = 8
_INTERVAL_S = 0.002
"""Between two samples of the profiler, in seconds of CPU time."""
_ROOT = str(Path(__file__).parents[1])
_OURS = (f"{_ROOT}/raycore/", f"{_ROOT}/placement/")
_SIMULATION = (f"{_ROOT}/tests/", f"{_ROOT}/benchmarks/")


class Profiler:
    """Samples which simulated process runs, and which function of raycore."""

    def __init__(self) -> None:
        self.phase = "start"
        self.seconds: dict[str, Counter[str]] = defaultdict(Counter)
        """By phase: CPU seconds of raycore's code, by kind of process."""
        self.functions: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        """By phase and kind of process: the same, by function."""
        self._last_s = 0.0

    def start(self) -> None:
        self._last_s = time.process_time()
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, _INTERVAL_S, _INTERVAL_S)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        from simulation.world import kernel

        now_s = time.process_time()
        took_s, self._last_s = now_s - self._last_s, now_s
        thread = kernel.the_world.current if kernel.the_world is not None else None
        if thread is None:
            return
        kind = kind_of(thread.process.name)
        found: list[str] = []
        while frame is not None and len(found) < 2:
            path = frame.f_code.co_filename
            if not found and path.startswith(_SIMULATION):
                return
            if path.startswith(_OURS):
                found.append(f"{path.removeprefix(_ROOT + '/')}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        if found:
            self.seconds[self.phase][kind] += took_s
            self.functions[self.phase, kind][" < ".join(found)] += took_s


def kind_of(process: str) -> str:
    """What a simulated process is, by its name."""
    for part, kind in (("api_server", "API server"), ("control", "control actor"), ("_dp", "rank")):
        if part in process:
            return kind
    return process


class Load:
    """Requests of all API servers, whose processes are one real process."""

    def __init__(self, num_requests: int, num_servers: int, concurrency: int) -> None:
        self.num_left = num_requests
        self.num_ended = 0
        self.num_requests = num_requests
        self.concurrency = concurrency
        self.wrong: list[str] = []
        self.clients: list[Any] = []
        self.num_servers = num_servers
        self.is_on = False

    def run_on(self, client: Any) -> None:
        """Keep requests running on a client until none is left."""
        import random

        from raycore.client.ask import asks_of
        from raycore.client.inputs import ParsedPrompt
        from raycore.sampling_params import SamplingParams

        draw = random.Random(len(self.clients))
        self.clients.append(client)
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)

        def submit() -> None:
            if self.num_left <= 0:
                return
            self.num_left -= 1
            prefix = draw.randrange(64)
            tokens = [1 + (prefix * 31 + i) % 250 for i in range(64)] + [1 + draw.randrange(250) for _ in range(32)]
            client.submit(asks_of([ParsedPrompt(None, tokens)], params), take)

        def take(updates: list[Any]) -> None:
            for update in updates:
                if update.is_last:
                    self.num_ended += 1
                    got = [] if update.output is None else list(update.output.outputs[0].token_ids)
                    if len(got) != NUM_TOKENS:
                        self.wrong.append(f"{update.request_id}: {got}, {update.error}")
                    submit()

        for _ in range(self.concurrency):
            submit()


LOAD: Load


def make_rank() -> Any:
    """The actor class of ranks without an engine."""
    import msgspec
    import numpy as np

    from raycore.activity import Activity
    from raycore.engine.decoding import decode_requests
    from raycore.engine.mailbox import Mailbox
    from raycore.messages import EngineInfo, FinishedRequest, LoadView
    from raycore.node import lifeline
    from raycore.ray_api import actor_class, end_with_raylet, endpoint, node_id
    from raycore.scheduler.outputs import StepOutputs
    from raycore.system import os as own_os
    from raycore.system import threading
    from raycore.system import time as own_time
    from raycore.worker.rank import RankIdentity

    class CheapRank:
        """Stands in for `DPEngineCoreActor`."""

        def __init__(self, config_bytes: bytes, identity: RankIdentity, bundles: object, name: str) -> None:
            self.dp_rank = identity.dp_rank
            self.told = threading.Event()
            self.mailbox = Mailbox()
            self.changed = threading.Condition()
            self.requests: list[Any] = []
            end_with_raylet()
            lifeline.lock()

        @endpoint("run")
        def wait_for_init(self, rendezvous: str | None, dtype: str | None, num_blocks: int | None) -> bytes:
            info = EngineInfo(
                *(self.dp_rank, own_os.getpid(), node_id(), 4096, 16, 1024, dtype or "float32"),
                timings_s={},
                worker_pids=[],
            )
            return msgspec.msgpack.encode(info)

        @endpoint()
        def load_progress(self) -> float:
            return 0.5

        @endpoint("run")
        def run(self, peers: list[object], activity: Activity) -> None:
            while not self.told.is_set():
                with self.changed:
                    self.changed.wait_for(lambda: self.requests or self.told.is_set())
                own_time.sleep(0.05)  # a step
                with self.changed:
                    requests, self.requests = self.requests, []
                if requests:
                    self.mailbox.publish(self._answers(requests), LoadView(0, 0, 0.0))

        @staticmethod
        def _answers(requests: list[Any]) -> StepOutputs:
            seq_ids = np.repeat(np.array([each.seq_id for each in requests], np.int64), NUM_TOKENS)
            return StepOutputs(
                started=[(each.seq_id, 0) for each in requests],
                finished=[FinishedRequest(each.seq_id, "length") for each in requests],
                seq_ids=seq_ids,
                token_ids=np.full(len(seq_ids), 65, np.int32),
                duration_s=0.05,
                flush_interval_s=0.0,
            )

        @endpoint("io")
        def step_age_s(self) -> float:
            return 0.0

        @endpoint("io", replies=False)
        def submit(self, requests: bytes) -> None:
            decoded, _ = decode_requests(requests)
            with self.changed:
                self.requests += decoded
                self.changed.notify_all()

        @endpoint("io", replies=False)
        def abort(self, seq_ids: list[int]) -> None:
            pass

        @endpoint("io")
        def forget_client(self, client: int, is_gone: bool = True, connection: int = 0) -> None:
            self.mailbox.forget_client(client, is_gone=is_gone, connection=connection)

        @endpoint("outputs")
        def outputs(self, client: int, connection: int) -> Any:
            yield from self.mailbox.outputs(client, connection)

        @endpoint("io")
        def stop(self) -> None:
            self.told.set()
            with self.changed:
                self.changed.notify_all()
            self.mailbox.close()

    return actor_class(CheapRank, concurrency_groups={"run": 1, "io": 1, "outputs": 20})


def make_server() -> Any:
    """The actor class of API servers without sockets."""
    from raycore.ray_api import actor_class, endpoint
    from raycore.server.multi_process.api_server import APIServer
    from raycore.system import os as own_os
    from raycore.system import threading
    from raycore.system import time as own_time

    class SilentServer(APIServer):
        @endpoint("ranks")
        def serve(self, address: Any, handed_at: str | None) -> int:
            def wait_and_run() -> None:
                while not LOAD.is_on:
                    own_time.sleep(0.5)
                LOAD.run_on(self._client)

            threading.Thread(target=wait_and_run, name="load").start()
            return own_os.getpid()

    groups = {"ranks": 1, "leaving": 8, "control": 4, "reports": 1}
    return actor_class(SilentServer, num_cpus=0, concurrency_groups=groups)


def measure(num_ranks: int, args: argparse.Namespace) -> None:
    """Run one number of ranks in a world of its own, and print what it costs."""
    global LOAD
    from unittest.mock import patch

    import simulation.installed  # noqa: F401

    # isort: split

    import logging
    from functools import partial

    from simulation.ray import api
    from simulation.ray.cluster import Cluster
    from simulation.ray.messages import Boundary, Message
    from simulation.world.kernel import Pace, World
    from simulation.world.own_state import OwnState

    from raycore.cluster import manager
    from raycore.cluster.runtime import RayRuntime
    from raycore.demo import demo_model_path
    from raycore.llm import AsyncLLM
    from raycore.parts.adapters.server.adapters import OfferedAdapters
    from raycore.server.listen_options import ListenOptions
    from raycore.server.multi_process import api_servers
    from raycore.server.options import ServerOptions
    from raycore.system import time as own_time

    logging.disable(logging.CRITICAL)
    world = World(1, Pace(1e9, 1e-7, False, 0.0), last_s=1e6, max_changes=1 << 62)
    OwnState(world)
    cluster = Cluster(world, share_of_late_values=0.0)
    cluster.tells_messages = False
    profiler = Profiler()
    LOAD = Load(args.requests, args.servers, args.concurrency)
    messages: dict[str, Counter[str]] = defaultdict(Counter)
    spans: dict[str, tuple[float, float]] = {}
    ended: Counter[str] = Counter()
    threads: Counter[str] = Counter()
    processes: Counter[str] = Counter()

    def count(boundary: Boundary, message: Message) -> None:
        if boundary is Boundary.BEFORE:
            kind = "GCS" if message.kind != "call" else "call"
            messages[profiler.phase][f"{kind} {message.what}"] += 1
        elif boundary is Boundary.ANSWERED and message.kind == "call" and message.what in ("outputs", "reports"):
            messages[profiler.phase][f"item {message.what}"] += 1

    cluster.on_boundary = count

    def begin(phase: str) -> None:
        now_s, cpu_s = world.now_s, time.process_time()
        ended[profiler.phase] += LOAD.num_ended - ended.total()
        if profiler.phase in spans:
            began_s, before_s = spans[profiler.phase]
            spans[profiler.phase] = now_s - began_s, cpu_s - before_s
        profiler.phase = phase
        spans[phase] = now_s, cpu_s
        print(f"  {phase}: {cpu_s:.0f} s", file=sys.stderr, flush=True)

    def drive() -> None:
        api.init()
        begin("start")
        llm = AsyncLLM(
            demo_model_path(),
            use_tqdm_on_load=False,
            data_parallel_size=num_ranks,
            executor_backend="inline",
            device="cpu",
            dtype="float32",
            standby_delay_s=None,
        )
        begin("servers")
        options = ServerOptions(["demo"])
        servers = api_servers.APIServers(llm, options, OfferedAdapters(llm, options), ListenOptions(), args.servers)
        servers.start()
        own_time.sleep(10.0)
        begin("idle")
        own_time.sleep(args.idle)
        for process in world.processes:
            if not process.has_ended:
                processes[kind_of(process.name)] += 1
                threads[kind_of(process.name)] += sum(not thread.is_over for thread in process.threads)
        begin("load")
        LOAD.is_on = True
        while LOAD.num_ended < LOAD.num_requests // 2:
            own_time.sleep(0.2)
        begin("loss")
        killed = cluster.nodes[-1]
        for process in [each for each in killed.processes if "_dp" in each.name]:
            world.kill(process)
        while LOAD.num_ended < LOAD.num_requests:
            own_time.sleep(0.2)
        begin("end")
        assert not LOAD.wrong, LOAD.wrong[:3]
        servers.stop()
        llm.shutdown()
        begin("over")

    def drive_or_exit() -> None:
        try:
            drive()
        except BaseException:
            traceback.print_exc()
            print(world.failures[:4], file=sys.stderr, flush=True)
            os._exit(1)  # otherwise all others would go on

    def main() -> None:
        from simulation.world import threads as its

        for _ in range(1 + -(-num_ranks // RANKS_PER_NODE)):
            cluster.add_node(CPU=float(RANKS_PER_NODE))
        driver = cluster.drive("driver", drive_or_exit, cluster.head)
        ended = its.Event()
        driver.on_end.append(lambda _: ended.set())
        ended.wait()

    with (
        patch.object(manager, "RayRuntime", partial(RayRuntime, make_rank())),
        patch.object(api_servers, "API_SERVER", make_server()),
    ):
        profiler.start()
        world.run(main, "judge")
        profiler.stop()
    assert not [failure for failure in world.failures if "rank" not in kind_of(failure[0].process.name)], world.failures
    tell(num_ranks, args, profiler, spans, messages, threads, processes, NUM_TOKENS * ended["load"])


def tell(
    num_ranks: int,
    args: argparse.Namespace,
    profiler: Profiler,
    spans: dict[str, tuple[float, float]],
    messages: dict[str, Counter[str]],
    threads: Counter[str],
    processes: Counter[str],
    tokens: int,
) -> None:
    """Print the figures of one number of ranks."""
    seconds, servers = profiler.seconds, max(1, args.servers)
    idle_s, load_s = spans["idle"][0], spans["load"][0]
    loaded = seconds["load"]
    print(f"{num_ranks} ranks, {args.servers} API servers, {args.requests} requests of {NUM_TOKENS} tokens")
    rows: list[tuple[str, str]] = [
        ("start: driver's CPU, s", f"{seconds['start']['driver']:.2f}"),
        ("start of API servers: driver's CPU, s", f"{seconds['servers']['driver']:.2f}"),
        ("start of API servers: each one's CPU, s", f"{seconds['servers']['API server'] / servers:.2f}"),
        ("idle: driver's CPU, % of a core", f"{100 * seconds['idle']['driver'] / idle_s:.2f}"),
        ("idle: an API server's CPU, % of a core", f"{100 * seconds['idle']['API server'] / servers / idle_s:.2f}"),
        ("load: an API server's CPU, µs a token", f"{1e6 * loaded['API server'] / tokens:.1f}"),
        ("load: driver's CPU, % of a core", f"{100 * loaded['driver'] / load_s:.2f}"),
        ("virtual seconds of load", f"{load_s:.1f}"),
        ("loss: driver's CPU, s", f"{seconds['loss']['driver']:.2f}"),
        *((f"threads of each {kind}", f"{threads[kind] / processes[kind]:.0f}") for kind in ("driver", "API server")),
        ("most memory of the whole world, MB", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}"),
    ]
    for phase in ("start", "servers", "idle", "load", "loss"):
        span_s = spans[phase][0]
        gcs = sum(count for what, count in messages[phase].items() if what.startswith("GCS"))
        rows.append((f"{phase}: calls of the control store ({span_s:.1f} virtual s)", str(gcs)))
        told = [f"{what} {count}" for what, count in messages[phase].most_common(9)]
        rows.append((f"{phase}: messages", ", ".join(told)))
    for name, figure in rows:
        print(f"  {name:60} {figure}")
    if args.profile:
        for (phase, kind), functions in sorted(profiler.functions.items()):
            print(f"  {phase}, {kind}: {sum(functions.values()):.2f} s")
            for name, took_s in functions.most_common(args.profile):
                print(f"    {took_s:8.2f} {name}")
    sys.stdout.flush()


def main() -> None:
    """Run each number of ranks in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 16, 256, 1024])
    parser.add_argument("--servers", type=int, default=16, help="number of API servers; raycore serve allows 12")
    parser.add_argument("--requests", type=int, default=20_000, help="of all API servers together")
    parser.add_argument("--concurrency", type=int, default=64, help="requests that each API server keeps running")
    parser.add_argument("--idle", type=float, default=20.0, help="virtual seconds without requests")
    parser.add_argument("--profile", type=int, nargs="?", const=12, help="show so many functions")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        measure(args.ranks[0], args)
        return
    for num_ranks in args.ranks:
        again = [*sys.argv[1:], "--here", "--ranks", str(num_ranks)]
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        subprocess.run([sys.executable, __file__, *again], env=environment, check=True)


if __name__ == "__main__":
    main()
