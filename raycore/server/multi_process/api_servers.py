"""Several processes that serve one port. The driver starts, watches, restarts and stops them.

Each process has its own listening socket, and the kernel spreads connections over these sockets. If a process dies, its
connections are lost, the ranks abort its requests, the other processes continue, and a new process replaces it.

Processes may be on all nodes of the cluster: then each node has as many, on the same port. Nodes that join get theirs,
and those of nodes that end are forgotten.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from ray.exceptions import GetTimeoutError, RayError

from placement.topology import NodeView, read_cluster
from raycore.client.rank_connections import Sent
from raycore.cluster.failure_reports import describe_death
from raycore.cluster.restart_budget import RestartBudget
from raycore.engine.engine_actor import MAX_CLIENTS
from raycore.engine.rank_events import RankEvent
from raycore.errors import InitializationError, InvalidConfig, RaycoreError
from raycore.llm import AsyncLLM
from raycore.messages import NO_LOAD, LoadView
from raycore.metrics.counts import RankCounts
from raycore.node.processes import send_signal, wait_until_gone
from raycore.parts.adapters.server.adapters import OfferedAdapter, OfferedAdapters
from raycore.ray_api import Stream, checked, get, kill, node_id, on_node, wait
from raycore.server.dialects.responses.store import MemoryStore
from raycore.server.http.counts import HttpCounts, total
from raycore.server.listen_options import ListenOptions
from raycore.server.multi_process.api_server import API_SERVER, APIServer
from raycore.server.multi_process.driver_calls import READ_METRICS, DriverCall, run_call
from raycore.server.multi_process.reports import RankView, Report
from raycore.server.options import ServerOptions
from raycore.server.process.serving import GOODBYE_S
from raycore.system import Future, os, signal, threading, time

if TYPE_CHECKING:
    from ray import ObjectRef

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_API_SERVERS = MAX_CLIENTS - 4
"""Maximum number of API servers. The other clients that a rank allows are the driver's own client, and the clients of
processes that have just died."""

_START_TIMEOUT_S = 120.0
_ANSWER_S = 30.0
"""A process that takes more seconds than this to reply to a call counts as stuck, and is replaced."""

_POLL_INTERVAL_S = 0.5
_END_TIMEOUT_S = 5.0
_NODES_INTERVAL_S = 2.0
"""Interval at which nodes are looked for that have joined or ended."""

_NO_VIEW = RankView()


class _Ended(Exception):
    """A process has ended or is stuck."""


class APIServers:
    """`count` processes on each of some nodes, which serve one address there."""

    def __init__(
        self,
        engine: AsyncLLM,
        options: ServerOptions,
        adapters: OfferedAdapters,
        address: ListenOptions,
        count: int,
        handed_at: str | None = None,
        *,
        on_all_nodes: bool = False,
    ) -> None:
        """Create no processes yet.

        Args:
            adapters: those that all processes offer.
            address: where all of them listen, each on its node.
            handed_at: where they get a socket that listens already (`handed_over`). None: each opens its own.
            on_all_nodes: whether all nodes of the cluster have processes. Otherwise, only this one has.

        Raises:
            InvalidConfig: `count` is out of range.
        """
        if not 1 <= count <= MAX_API_SERVERS:
            raise InvalidConfig(f"api_server_count={count} isn't in [1, {MAX_API_SERVERS}]")
        each = msgspec.structs.replace(options, max_streams=-(-options.max_streams // count))
        self._engine = engine
        self._factory = _Factory(engine, each, adapters, (address, handed_at))
        self._count = count
        self._on_all_nodes = on_all_nodes
        self._monitors: dict[str, list[_ServerMonitor]] = {}
        """By the id of the node. Those of nodes that have ended are removed."""
        self._without: set[str] = set()
        """Nodes for which no client is left."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow_nodes, name="raycore-api-server-nodes", daemon=True)

    def start(self) -> None:
        """Start all processes, and return once they serve.

        Raises:
            InitializationError: a process failed to start. Its error is the cause.
        """
        own = node_id()
        others = [node for node in read_cluster().usable_nodes if node.node_id != own] if self._on_all_nodes else []
        self._monitors[own] = self._made(own)
        for node in others:
            self._add(node)
        for monitor in self._all():
            monitor.start()
        for monitor in self._all():
            monitor.wait_until_serving()
        if self._on_all_nodes:
            self._thread.start()

    def check(self) -> None:
        """Raise if all API servers have been given up."""
        if all(monitor.has_given_up for monitor in self._all()):
            raise RuntimeError("all API servers failed too often and were given up; see the log")

    def stop(self) -> None:
        """Stop accepting connections, wait up to 10 s for responses in progress, and end the API server processes.

        Idempotent.
        """
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_END_TIMEOUT_S)
        for monitor in self._all():
            monitor.leave()
        for monitor in self._all():
            monitor.join()

    def _all(self) -> list[_ServerMonitor]:
        return [monitor for monitors in list(self._monitors.values()) for monitor in monitors]

    def _made(self, node_id: str, where: str = "") -> list[_ServerMonitor]:
        return [
            _ServerMonitor(f"{index}{where}", partial(self._factory.make, index, node_id), self._factory, self._engine)
            for index in range(self._count)
        ]

    def _add(self, node: NodeView) -> list[_ServerMonitor]:
        """Make the monitors of another node, unless the ranks can't have so many clients."""
        if len(self._all()) + self._count > MAX_API_SERVERS:
            if node.node_id not in self._without:
                self._without.add(node.node_id)
                text = "node %s gets no API servers: an engine has at most %d, and other nodes have %d"
                logger.warning(text, node.ip, MAX_API_SERVERS, len(self._all()))
            return []
        self._monitors[node.node_id] = self._made(node.node_id, f" on {node.ip}")
        return self._monitors[node.node_id]

    def _follow_nodes(self) -> None:
        """Let nodes that join have processes, and forget those of nodes that have ended."""
        while not self._stopping.wait(_NODES_INTERVAL_S):
            try:
                view = read_cluster()
            except Exception as error:  # Ray raises many types while its control store is away
                logger.debug("can't ask which nodes there are: %s", error)
                continue
            for ended in self._monitors.keys() - {node.node_id for node in view.nodes if node.alive}:
                for monitor in self._monitors.pop(ended):
                    monitor.leave()
            for node in view.usable_nodes:
                if node.node_id not in self._monitors:
                    for monitor in self._add(node):
                        monitor.start(may_fail=True)


class _Process:
    """The process of one API server. To the engine's `ClientGroup`, it is a `RemoteClient`."""

    def __init__(self, actor: APIServer, client_index: int, *, is_here: bool = True) -> None:
        """`is_here`: whether the process is on this node."""
        self.actor = actor
        self.client_index = client_index
        self._is_here = is_here
        self.pid: int | None = None
        self._report = Report()
        self._counts: dict[int, RankCounts] = {}
        self._lock = threading.Lock()
        self._calls: dict[ObjectRef[None], float] = {}
        """Calls that the process hasn't replied to yet, with their deadlines."""

    # ---- the methods of `RemoteClient`

    def on_rank_event(self, event: RankEvent) -> None:
        self._tell(self.actor.on_rank_event.remote(event))

    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float, come_back: bool = False) -> Future[None]:
        return self.actor.ranks_leaving.remote(dp_ranks, timeout_s, come_back).future()

    def drain(self, timeout_s: float) -> Future[bool]:
        return self.actor.drain.remote(timeout_s).future()

    def abort_all(self) -> None:
        self._tell(self.actor.abort_all.remote())

    def abort_requests(self, request_ids: Sequence[str] | None) -> Future[int]:
        return self.actor.abort_requests.remote(request_ids).future()

    def forget_images(self) -> Future[None]:
        return self.actor.forget_images.remote().future()

    def pause_new(self) -> Future[None]:
        call = self.actor.pause_new.remote()
        self._tell(call)
        return call.future()

    def wait_for_older(self) -> Future[bool]:
        return self.actor.wait_for_older.remote().future()

    def complete_pause(self, sent: Sent, aborts: bool, timeout_s: float) -> Future[bool]:
        return self.actor.complete_pause.remote(sent, aborts, timeout_s).future()

    def resume_new(self) -> None:
        self._tell(self.actor.resume_new.remote())

    @property
    def num_unfinished_requests(self) -> int:
        """Number of the process's unfinished requests, as last reported."""
        return self._report.num_unfinished

    @property
    def num_waiting_for_rank(self) -> int:
        """Number of the process's requests that wait because no rank serves, as last reported."""
        return self._report.num_waiting_for_rank

    def counts(self) -> dict[int, RankCounts]:
        """The process's counts for each rank, as last reported, by dp_rank."""
        return self._counts

    def num_own(self, dp_rank: int) -> int:
        """Number of the process's requests on a rank, as last reported."""
        return self._report.ranks.get(dp_rank, _NO_VIEW).num_own

    def load(self, dp_rank: int) -> LoadView:
        """A rank's load, as last reported; `NO_LOAD` if the process has no requests on the rank."""
        return self._report.ranks.get(dp_rank, _NO_VIEW).load if self.num_own(dp_rank) else NO_LOAD

    # ---- used by the monitor

    def set_adapters(self, adapters: Sequence[OfferedAdapter]) -> Future[None]:
        """Have the process offer exactly these adapters. Requests that it gets after the future is done find them."""
        call = self.actor.set_adapters.remote(adapters)
        self._tell(call)
        return call.future()

    @property
    def http(self) -> HttpCounts:
        """The process's HTTP counts, as last reported."""
        return self._report.http

    def serve(self, address: ListenOptions, handed_at: str | None) -> None:
        """Have the process start to serve. Returns once it serves. Raises RayError or GetTimeoutError on failure."""
        self.pid = get(self.actor.serve.remote(address, handed_at), timeout_s=_START_TIMEOUT_S)

    def reports(self) -> Iterator[Report | None]:
        """Yield the process's reports as they arrive, and None every half a second.

        Raises:
            _Ended: the process has ended or doesn't reply.
        """
        reports = Stream(self.actor.reports)
        while True:
            with self._lock:
                calls = dict(self._calls)
            done, _ = wait([reports.call, *calls], num_returns=1, timeout_s=_POLL_INTERVAL_S)
            if done and calls:  # there are many after a start: one for each rank
                done, _ = wait([reports.call, *calls], num_returns=1 + len(calls), timeout_s=0)
            if reports.call in done:
                self._report = msgspec.msgpack.decode(_get(_next(reports)), type=Report)
                self._counts = self._counts | self._report.counts
                yield self._report
            for call in (call for call in calls if call in done):
                _get(call)
                with self._lock:
                    del self._calls[call]
            late = [ref for ref, due_s in calls.items() if ref not in done and time.monotonic() > due_s]
            if late:
                raise _Ended(f"it hasn't replied for {_ANSWER_S:g} s")
            yield None

    def kill(self) -> None:
        """Kill the process, and wait until it has ended if it is on this node. Ray ends it on another."""
        kill(self.actor)
        if self.pid is not None and self._is_here and wait_until_gone([self.pid], _END_TIMEOUT_S):
            send_signal([self.pid], signal.SIGKILL)  # a stuck process doesn't react to Ray's request to exit
            if wait_until_gone([self.pid], _END_TIMEOUT_S):
                logger.warning("API server process %d is still running %g s after SIGKILL", self.pid, _END_TIMEOUT_S)

    def _tell(self, call: ObjectRef[None]) -> None:
        with self._lock:
            self._calls[call] = time.monotonic() + _ANSWER_S


def _next(refs: Iterator[ObjectRef[T]]) -> ObjectRef[T]:
    try:
        return next(refs)
    except StopIteration:
        raise _Ended("it stopped sending status reports") from None


def _get(ref: ObjectRef[T]) -> T:
    try:
        return get(ref)
    except RayError as error:
        raise _Ended(describe_death(error)) from error


class _Factory:
    """Creates the API server processes of an engine."""

    def __init__(
        self,
        engine: AsyncLLM,
        options: ServerOptions,
        adapters: OfferedAdapters,
        address: tuple[ListenOptions, str | None],
    ) -> None:
        self.address = address
        self.adapters = adapters
        self.store = MemoryStore(options.max_stored_responses, options.max_stored_response_bytes)
        """The responses of all processes."""
        self._engine = engine
        self._options = options
        # kept, because a process may have to start while no rank is up
        self._limits = min(engine.engine_infos, key=lambda info: info.num_kv_tokens)
        self.http: dict[int, HttpCounts] = {}
        """HTTP counts of each process, including processes that have ended, by client_index."""
        self._indices = itertools.count(1)
        """Client indices that haven't been used. 0 is that of the driver's own client. No index is used twice, because
        output for a dead process must not reach another process."""

    def make(self, index: int, node: str) -> _Process:
        """Create the process of API server `index` of a node. The process doesn't serve yet."""
        client_index = next(self._indices)
        name = f"raycore_{self._engine.name}_api_server_{index}"
        actor = API_SERVER.options(
            # Ray may still hold the name of a process that has ended
            name=f"{name}_{client_index}",
            scheduling_strategy=on_node(node),
        ).remote(
            self._engine.config.encode(),
            client_index,
            checked(self._limits),
            checked(self._options),
            self._engine.config.traces.variables(os.environ),
            name,
        )
        return _Process(actor, client_index, is_here=node == node_id())


class _ServerMonitor:
    """The thread that watches one API server and replaces its process when it ends."""

    def __init__(self, name: str, make: Callable[[], _Process], factory: _Factory, engine: AsyncLLM) -> None:
        """
        Args:
            name: how messages name the server.
            make: creates its process.
        """
        self.has_given_up = False
        self._name = name
        self._make = make
        self._factory = factory
        self._engine = engine
        self._budget = RestartBudget(engine.config.recovery)
        self._first: Future[None] = Future()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"raycore-api-server-{name}", daemon=True)

    def start(self, *, may_fail: bool = False) -> None:
        """`may_fail`: whether a process that doesn't start is tried again, as one that ends later."""
        if may_fail:
            self._first.set_result(None)
        self._thread.start()

    def wait_until_serving(self) -> None:
        try:
            self._first.result(_START_TIMEOUT_S + _END_TIMEOUT_S)
        except (RayError, GetTimeoutError, _Ended) as error:
            raise InitializationError(f"API server {self._name} didn't start: {describe_death(error)}") from error

    def leave(self) -> None:
        self._leaving.set()

    def join(self) -> None:
        if self._thread.is_alive():
            self._thread.join(2 * GOODBYE_S + 3 * _END_TIMEOUT_S)

    def _run(self) -> None:
        delay_s: float | None = 0.0
        while delay_s is not None and not self._leaving.wait(delay_s):
            try:
                with self._running() as process:
                    self._watch(process)
            except (RayError, GetTimeoutError, _Ended) as error:
                if not self._first.done():
                    self._first.set_exception(error)
                    return
                if not self._leaving.is_set():
                    logger.error("API server %s ended, and its connections are lost: %s", self._name, error)
            delay_s = self._budget.next_delay_s(time.monotonic())
        if not self._leaving.is_set():
            self.has_given_up = True
            logger.error("API server %s failed too often and won't be restarted", self._name)

    @contextmanager
    def _running(self) -> Generator[_Process, None, None]:
        """Start a process, and let it serve while the block runs. Kills the process at the end."""
        process = self._make()
        adapters = self._factory.adapters
        try:
            self._engine.clients.join(process)
            adapters.subscribe(process.set_adapters)
            process.serve(*self._factory.address)
            logger.info("API server %s is serving (pid %d)", self._name, process.pid)
            if not self._first.done():
                self._first.set_result(None)
            yield process
        finally:
            adapters.unsubscribe(process.set_adapters)
            self._engine.clients.leave(process)
            process.kill()

    def _watch(self, process: _Process) -> None:
        """Handle the process's reports until `leave()` is called. Raises an error if the process ends before that."""
        for report in process.reports():
            self._factory.http[process.client_index] = process.http
            for dp_rank, reason in report.broken if report is not None else []:
                self._engine.report(dp_rank, reason)
            for call in report.calls if report is not None else []:
                # on its own thread: a call may take minutes
                args = process, call
                threading.Thread(target=self._answer, args=args, name=f"raycore-{call.method}", daemon=True).start()
            if self._leaving.is_set():
                stopped = process.actor.stop.remote()
                wait([stopped], timeout_s=2 * GOODBYE_S)
                return

    def _answer(self, process: _Process, call: DriverCall) -> None:
        result: Any
        error: RaycoreError | None
        if call.method == READ_METRICS:
            result, error = (self._engine.read_metrics(), total(list(self._factory.http.values()))), None
        else:
            result, error = run_call(self._engine, self._factory.adapters, self._factory.store, call)
        if not self._leaving.is_set():
            process.actor.finish_call.remote(call.number, result, error)
