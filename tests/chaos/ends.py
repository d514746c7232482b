"""Ends each process of an engine, on a cluster of two nodes on this machine, and looks for what remains.

An engine has a rank on each node, with an engine process, a worker and a standby. It belongs to a driver, a job's
driver, an actor, a task or a Serve replica. One process gets a signal. If that ends the engine, nothing of it may
remain after 10 s: no process but the program, if that lives on, no actor, no placement group, and no file in /dev/shm
or in the directory for temporary files. If the engine survives, it is ended afterwards, and then the same holds.

    python -m tests.chaos.ends                     all rows
    python -m tests.chaos.ends --rows "actor;task" those whose names have one of these parts
    python -m tests.chaos.ends --list              their names

The exit status is 1 if anything remains, or if an engine that has to fail doesn't.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shared_memory
from common import table
from ray._private.state import GlobalState
from ray._raylet import GcsClientOptions
from ray.cluster_utils import Cluster

from raycore.node.processes import is_running, send_signal, wait_until_gone

PROGRAM = str(Path(__file__).with_name("owned_engine.py"))
START_S = 240.0
LEFT_S = 10.0
RAYS_TIMES = {"RAY_gcs_rpc_server_reconnect_timeout_s": "15"}
"""How long Ray's processes live without the control store, instead of a minute."""

ALL_S = 100.0
"""In which a program ends whose control store, or whose node's daemon, is gone: Ray's own exit waits for these."""

MARK = "RAYCORE_ENDS_ROW"
_RAYS_OWN = (
    "ray::IDLE",
    "ray::ServeController",
    "ray::ProxyActor",
    "ray::RuntimeEnvAgent",
    "ray::DashboardAgent",
    "ray::JobSupervisor",
)
_RAYS_OWN_ACTORS = ("ServeController", "Proxy", "JobSupervisor")
_NODE_OPTIONS: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False, "num_cpus": 4}


@dataclass(frozen=True)
class Row:
    """What is ended, and of which engine."""

    owner: str
    """`driver`, `job`, `actor`, `task` or `replica`."""
    victim: Callable[[Engine], list[int]]
    what: str
    number: int = signal.SIGKILL
    """The signal. 0: none, because the program ends its engine by itself when its input ends."""
    owner_on_head: bool = True
    """Whether the owner is on the head's node, where the driver is."""
    reaper_with_owner: bool = True
    survives: bool = False
    """Whether the engine does."""
    ends_late: bool = False
    """Whether Ray holds the owner's exit up."""

    @property
    def name(self) -> str:
        if not self.number:
            return f"{self.owner}: {self.what}"
        where = reaper = ""
        if self.owner not in ("driver", "job"):
            where = f", owner on the {'head' if self.owner_on_head else 'other'} node"
        if self.owner in ("actor", "task"):
            reaper = f", reaper {'with it' if self.reaper_with_owner else 'elsewhere'}"
        return f"{self.owner}{where}{reaper}: {signal.Signals(self.number).name} to {self.what}"


class Engine:
    """An engine that belongs to a program of its own, and the cluster of both. To be closed."""

    def __init__(self, row: Row, directory: str) -> None:
        self._mark = os.environ[MARK]
        self._files_before = shared_memory.files()
        self._temporary = Path(directory, "temporary")
        self._temporary.mkdir()
        os.environ["TMPDIR"] = str(self._temporary)
        head_options = _NODE_OPTIONS | {"include_dashboard": row.owner == "job", "dashboard_port": 0}
        self._cluster = Cluster(initialize_head=True, head_node_args=head_options)
        self._nodes = [self._cluster.head_node, self._cluster.add_node(**_NODE_OPTIONS)]
        self._tables = GlobalState()
        self._tables._initialize_global_state(GcsClientOptions.create(self._cluster.address, None, True, False))
        head, other = (node.node_id for node in self._nodes)
        owner_node, remote = (head, other) if row.owner_on_head else (other, head)
        arguments = [row.owner, owner_node, owner_node if row.reaper_with_owner else remote, directory]
        self._environment = os.environ | {"RAY_ADDRESS": self._cluster.address}
        self.program = subprocess.Popen(
            [sys.executable, PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        self.said: dict[str, Any] = {}
        self.errors: list[str] = []
        self._changed = threading.Condition()
        for read in (self._read_output, self._read_errors):
            threading.Thread(target=read, daemon=True).start()
        self._wait_until("the engine is up", lambda: "owner" in self.said, START_S)
        self._wait_until("its other actors are up", self._is_complete, START_S)
        time.sleep(1.0)  # they are stopped once they have said that they are ready

    def _is_complete(self) -> bool:
        """Whether the standbys, their workers and the control actor, which come last, have processes."""
        standbys = self.actors("_standby")
        return len(standbys) == 2 * len(self._nodes) and all([*standbys, *(self.actors("EngineControl") or [0])])

    # ---- what there is

    def actors(self, part: str) -> list[int]:
        """The process ids of the living actors with this in their name or class."""
        return [pid for name, pid in self._living_actors() if part in name]

    def standbys(self) -> list[int]:
        """The engine processes of the standbys."""
        return [pid for name, pid in self._living_actors() if "_standby" in name and "DPEngine" in name]

    def raylet(self, index: int) -> list[int]:
        """The node daemon of the head (0) or the other node (1)."""
        return [each.process.pid for each in self._nodes[index].all_processes["raylet"]]

    def control_store(self) -> list[int]:
        return [each.process.pid for each in self._nodes[0].all_processes["gcs_server"]]

    def owner(self) -> list[int]:
        return [self.said["owner"]]

    def supervisor(self) -> list[int]:
        """The actor of Ray's that has started the job's driver."""
        return [pid for pid, command in _marked(self._mark) if command.startswith("ray::JobSupervisor")]

    def _living_actors(self) -> Iterator[tuple[str, int]]:
        for actor in self._tables.actor_table(None).values():
            if actor["State"] != "DEAD" and not actor["ActorClassName"].startswith(_RAYS_OWN_ACTORS):
                yield f"{actor['Name']} {actor['ActorClassName']}", actor["Pid"]

    def _processes(self) -> Iterator[tuple[int, str]]:
        """(pid, command line) of the marked processes that are neither Ray's own nor this one."""
        for pid, command in _marked(self._mark):
            is_rays = command.startswith(_RAYS_OWN) or ("ray::" not in command and PROGRAM not in command)
            if is_running(pid) and not is_rays:
                yield pid, command[:60]

    def remains(self, *, without_program: bool) -> list[str]:
        """What there is of the engine."""
        found = [
            f"process {command}"
            for pid, command in self._processes()
            if not (without_program and pid == self.program.pid)
        ]
        if is_running(self.control_store()[0]):
            # Ray notices the end of a node after more than 10 s: until then, its actors live on in Ray's tables
            found += [f"actor {name}" for name, pid in self._living_actors() if not pid or is_running(pid)]
            groups = self._tables.placement_group_table().values()
            found += [f"group {group['name']}" for group in groups if group["state"] != "REMOVED"]
        return found

    def wait_until_nothing_remains(self, *, without_program: bool) -> list[str]:
        """Returns what remains after 10 s. Empty as soon as nothing does."""
        deadline_s = time.monotonic() + LEFT_S
        while (left := self.remains(without_program=without_program)) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        files = shared_memory.abandoned_since(self._files_before, max(1.0, deadline_s - time.monotonic()))
        left += shared_memory.after_the_next_start(files)
        return left + [str(path) for path in self._temporary.glob("raycore*")]

    # ---- the program

    def end_input(self) -> None:
        assert self.program.stdin is not None
        self.program.stdin.close()

    def end_serve(self) -> None:
        """End the replicas by another program."""
        subprocess.run([sys.executable, PROGRAM, "end_serve"], env=self._environment, check=True, timeout=ALL_S)

    def wait_for_error(self, timeout_s: float) -> str | None:
        """What the program's requests have failed with. None: they haven't."""
        with self._changed:
            self._changed.wait_for(lambda: "error" in self.said, timeout_s)
        return self.said.get("error")

    def _wait_until(self, what: str, is_so: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_so():
            if self.program.poll() is not None or time.monotonic() > deadline_s:
                said = "".join(self.errors[-40:])
                raise RuntimeError(f"not within {timeout_s:g} s: {what}\n{self.remains(without_program=True)}\n{said}")
            time.sleep(0.1)

    def _read_output(self) -> None:
        for line in self.program.stdout or ():
            if line.startswith("{"):
                with self._changed:
                    self.said |= json.loads(line)
                    self._changed.notify_all()

    def _read_errors(self) -> None:
        self.errors.extend(self.program.stderr or ())

    def close(self) -> None:
        send_signal((pid for pid, _ in self._processes()), signal.SIGKILL)
        self.program.wait(10)
        self._cluster.shutdown()


def _marked(mark: str) -> Iterator[tuple[int, str]]:
    """(pid, command line) of all processes of a row but this one."""
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            if pid == os.getpid() or mark.encode() not in (entry / "environ").read_bytes():
                continue
            yield pid, (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue


def _rank(engine: Engine) -> list[int]:
    return engine.actors("_dp0 ")[:1]


ROWS = [
    Row("driver", Engine.owner, "the driver"),
    Row("driver", Engine.owner, "the driver", signal.SIGTERM),
    Row("driver", Engine.owner, "the driver", signal.SIGINT),
    Row("driver", lambda engine: engine.raylet(0), "its node's raylet"),
    Row("driver", lambda engine: engine.raylet(1), "the other node's raylet", survives=True),
    Row("driver", Engine.control_store, "Ray's control store", ends_late=True),
    Row("driver", _rank, "a rank", survives=True),
    Row("driver", lambda engine: engine.actors("WorkerActor")[:1], "a worker", survives=True),
    Row("driver", Engine.standbys, "standbys", survives=True),
    Row("driver", lambda engine: engine.actors("EngineControl"), "the control actor", survives=True),
    Row("job", Engine.owner, "the job's driver"),
    Row("job", Engine.owner, "the job's driver", signal.SIGTERM),
    Row("job", Engine.supervisor, "the job's supervisor"),
    Row("job", lambda engine: engine.raylet(0), "its node's raylet", ends_late=True),
    Row("job", _rank, "a rank", survives=True),
    Row("job", Engine.owner, "ray job stop", number=0),
    *(
        Row(kind, Engine.owner, "the owner", owner_on_head=on_head, reaper_with_owner=with_owner)
        for kind in ("actor", "task")
        for on_head, with_owner in ((True, True), (True, False), (False, True), (False, False))
    ),
    # Ray then waits until the actor's own calls have returned, and those to ranks return when the engine ends
    Row("actor", Engine.owner, "the owner", signal.SIGTERM, survives=True),
    Row("task", Engine.owner, "the owner", signal.SIGTERM),
    Row("actor", lambda engine: [engine.program.pid], "the driver", owner_on_head=False),
    Row("actor", lambda engine: [engine.program.pid], "the driver", owner_on_head=False, reaper_with_owner=False),
    Row("actor", lambda engine: engine.raylet(1), "its node's raylet", owner_on_head=False),
    Row("actor", lambda engine: engine.raylet(1), "its node's raylet", owner_on_head=False, reaper_with_owner=False),
    Row("actor", lambda engine: [*engine.actors("Reaper"), *engine.owner()], "the reaper and the owner"),
    Row("actor", lambda engine: engine.actors("Reaper"), "the reaper", survives=True),
    Row("actor", _rank, "a rank", survives=True),
    Row("replica", lambda engine: engine.actors("ServeReplica"), "the replica", survives=True),
    Row("replica", lambda engine: [engine.program.pid], "the driver", survives=True),
]


def run(row: Row) -> dict[str, Any]:
    """Returns what happened: the error of the program's requests, how long it took, and what remains."""
    with _marking(), _directory() as directory:
        engine = Engine(row, directory)
        try:
            return _end(row, engine)
        finally:
            engine.close()


def _end(row: Row, engine: Engine) -> dict[str, Any]:
    victims = row.victim(engine)
    if not victims:
        raise RuntimeError(f"there is no process: {engine.remains(without_program=False)}")
    started_s = time.monotonic()
    if row.number:
        send_signal(victims, row.number)
    else:
        engine.end_input()
    error = None
    if row.survives:
        time.sleep(LEFT_S)
        engine.end_input()
        if victims == [engine.program.pid]:
            engine.end_serve()
    elif row.what == "its node's raylet" and row.owner == "driver":
        error = engine.wait_for_error(LEFT_S) or "NO ERROR"
    elif row.ends_late:
        wait_until_gone(engine.owner(), ALL_S)
    lives_on = row.owner != "driver" or error is not None
    left = engine.wait_until_nothing_remains(without_program=lives_on and not row.survives)
    return {"row": row.name, "error": error, "seconds": round(time.monotonic() - started_s, 1), "left": left}


@contextmanager
def _marking() -> Iterator[None]:
    """Mark all processes of a row, and end those that are left, also of a cluster that didn't start.

    Whoever has started this may have chosen the mark, so that other processes have it, too.
    """
    mark = os.environ.setdefault(MARK, uuid.uuid4().hex)
    try:
        yield
    finally:
        send_signal([pid for pid, _ in _marked(mark)], signal.SIGKILL)


@contextmanager
def _directory() -> Iterator[str]:
    """For Ray's files: in a short path, since the names of sockets may have 107 characters."""
    directory = tempfile.mkdtemp(prefix="rc", dir="/tmp")
    os.environ["RAY_TMPDIR"] = directory
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="Parts of the names of rows, separated by semicolons.")
    parser.add_argument("--list", action="store_true", help="Print the names of rows.")
    args = parser.parse_args()
    parts = args.rows.split(";")
    rows = [row for row in ROWS if any(part in row.name for part in parts)]
    if args.list:
        print("\n".join(row.name for row in rows))
        return 0
    os.environ.update(RAYS_TIMES)
    results: list[dict[str, Any]] = []
    for row in rows:
        try:
            results.append(run(row))
        except Exception as error:  # the other rows still run
            results.append({"row": row.name, "error": None, "seconds": 0.0, "left": [f"FAILED: {error}"]})
        print(json.dumps(results[-1]), flush=True)
    lines = [
        [each["row"], each["seconds"], each["error"] or "", "; ".join(each["left"]) or "nothing"] for each in results
    ]
    print(table([["row", "s", "error", "what remains"], *lines]))
    return int(any(each["left"] or each["error"] == "NO ERROR" for each in results))


if __name__ == "__main__":
    sys.exit(main())
