"""The Ray actor through which servers whose ranks share experts find each other.

The ranks of all servers run every step together, so they start together, and are restarted together. From one such
start to the next is a *round*. It begins when all servers have come: all of the deployment for the first round, and all
that are left for later ones. It is over when a server fails, ends or joins. The servers then restart their ranks, and
come again. Requests continue on the new ranks.

Within a round, the ranks need no coordinator: they tell each other when a wave starts, and agree on its end in each
step. The actor belongs to the server that has created it. If that server ends, the round is over anyway, and another
server creates the next coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from raycore.cluster.owner import process_runs
from raycore.errors import InvalidConfig
from raycore.parts.servers.values import Place, RoundOver, SharingServer
from raycore.ray_api import actor_class, end_with_raylet, endpoint, title_process
from raycore.same_copy import unseal
from raycore.system import secrets, threading, time

if TYPE_CHECKING:
    from raycore.engine.engine_actor import DPEngineCoreActor

NAMESPACE = "raycore-servers"
"""The Ray namespace of coordinators."""
MAX_SERVERS = 32
"""Each occupies up to four threads of the actor, while its ranks start."""
_GRACE_S = 5.0
"""How long a new coordinator waits for more servers, in seconds, once one has come that has served before."""
_POLL_INTERVAL_S = 1.0
"""Interval, in seconds, at which waiting threads look again. A notification wakes them at once."""


def _runs(server: SharingServer) -> bool:
    return process_runs(server.worker_id, server.node_id)


class Coordinator:
    """Forms the rounds of one deployment. Thread-safe."""

    def __init__(self, name: str, runs: Callable[[SharingServer], bool] = _runs) -> None:
        """
        Args:
            name: the actor's name, for logs.
            runs: whether a server's process runs.
        """
        self._name = name
        title_process(name)
        end_with_raylet()
        self._runs = runs
        self._changed = threading.Condition()
        self._servers: dict[str, SharingServer] = {}
        """Those that run, by id."""
        self._here: set[str] = set()
        """Those that have come and have no place yet."""
        self._complete_s = math.inf
        """When those that are there are taken for all that are left. Before, all of the deployment have to come."""
        self._places: dict[str, Place] = {}
        """Those of the present round, by server. Empty between two rounds."""
        self._unseen: set[str] = set()
        """Servers that have yet to be told their places."""
        self._notes: dict[str, Any] = {}
        """What servers of the present round have told, by key."""
        self._why_over = "it hasn't begun"
        """Why the last round is over."""

    def __repr__(self) -> str:
        return self._name

    # ---- rounds

    @endpoint("waits")
    def come(self, data: bytes, timeout_s: float) -> Place | None:
        """Wait for the next round of the ranks of a server. Ends the present one if that has begun without these ranks.

        Args:
            data: an encoded `SharingServer`.
            timeout_s: how long to wait, in seconds. Call again if that was too short.

        Returns: the server's place. None: the round hasn't begun.

        Raises:
            InvalidConfig: the server can't share experts with the others. The message says why.
        """
        message = unseal(data, "the server that came", InvalidConfig)
        server = msgspec.msgpack.decode(message, type=SharingServer)
        self.look()
        with self._changed:
            self._check(server)
            self._servers[server.server_id] = server
            if server.server_id not in self._unseen:
                is_member = server.server_id in self._places
                self._end(f"{server.label} {'starts its ranks again' if is_member else 'joins the others'}")
                self._here.add(server.server_id)
                if server.has_served:
                    self._complete_s = min(self._complete_s, time.monotonic() + _GRACE_S)
                self._begin()
            self._changed.wait_for(lambda: server.server_id not in self._here, timeout_s)
            self._unseen.discard(server.server_id)
            return self._places.get(server.server_id)

    @endpoint("waits")
    def watch(self, round_id: str, timeout_s: float) -> str:
        """Wait until a round is over, at most `timeout_s` seconds. Returns why it is over; empty if it isn't."""
        self.look()
        with self._changed:
            is_over = self._changed.wait_for(lambda: not self._is_present(round_id), timeout_s)
            return self._why_over if is_over else ""

    @endpoint("tells")
    def end(self, round_id: str, why: str) -> bool:
        """Note that a round is over, because the ranks of one of its servers have ended. Returns whether it wasn't."""
        with self._changed:
            is_first = self._is_present(round_id)
            if is_first:
                self._end(why)
            return is_first

    @endpoint("tells")
    def leave(self, server_id: str) -> None:
        """Note that a server ends."""
        with self._changed:
            self._forget(server_id, "ends")

    def look(self) -> None:
        """Forget the servers whose processes have ended."""
        gone = [server_id for server_id, server in list(self._servers.items()) if not self._runs(server)]
        with self._changed:
            for server_id in gone:
                self._forget(server_id, "is gone")

    # ---- what ranks of a round need of each other

    @endpoint("tells")
    def tell(self, round_id: str, key: str, value: Any) -> None:
        """Note what the first server of a round says."""
        with self._changed:
            if self._is_present(round_id):
                self._notes[key] = value
                self._changed.notify_all()

    @endpoint("waits")
    def told(self, round_id: str, key: str) -> Any:
        """Wait for what the first server of a round says.

        Raises:
            RoundOver: it will say nothing any more.
        """
        with self._changed:
            self._wait_for(round_id, lambda: key in self._notes)
            return self._notes[key]

    @endpoint("waits")
    def others(self, round_id: str, server_id: str, actors: list[DPEngineCoreActor]) -> list[DPEngineCoreActor]:
        """Tell all servers of a round the actors of one server's ranks. Wait for those of all others, and return them.

        Raises:
            RoundOver: some of them won't come any more.
        """
        with self._changed:
            if self._is_present(round_id):
                self._notes[_ranks_of(server_id)] = actors
                self._changed.notify_all()
            self._wait_for(round_id, lambda: all(_ranks_of(each) in self._notes for each in self._places))
            return [actor for each in self._places if each != server_id for actor in self._notes[_ranks_of(each)]]

    def _wait_for(self, round_id: str, is_known: Callable[[], bool]) -> None:
        while self._is_present(round_id) and not is_known():
            self._changed.wait(_POLL_INTERVAL_S)
        if not self._is_present(round_id):
            raise RoundOver(f"the ranks can't start: {self._why_over}")

    # ---- with the lock

    def _is_present(self, round_id: str) -> bool:
        return any(place.round_id == round_id for place in self._places.values())

    def _check(self, server: SharingServer) -> None:
        """Raise InvalidConfig if a server doesn't fit the others."""
        for other in self._servers.values():
            if other.server_id == server.server_id:
                continue
            differing = sorted(name for name, value in other.options.items() if server.options.get(name) != value)
            if other.num_ranks_of_all != server.num_ranks_of_all:
                differing.insert(0, "data_parallel_size")
            if differing:
                raise InvalidConfig(
                    f"{server.label} can't share experts with {other.label}: they differ in {', '.join(differing)}. "
                    "If they are of two deployments in one Ray cluster, give each another data_parallel_rpc_port"
                )
            if server.first_rank < other.first_rank + other.num_ranks and (
                other.first_rank < server.first_rank + server.num_ranks
            ):
                raise InvalidConfig(
                    f"{server.label}: {other.label} runs. If they are of two deployments in one Ray cluster, give each "
                    "another data_parallel_rpc_port"
                )
        if len(self._servers.keys() | {server.server_id}) > MAX_SERVERS:
            raise InvalidConfig(f"{server.label}: {MAX_SERVERS} servers share experts, and more can't")

    def _begin(self) -> None:
        """Begin the next round if all have come."""
        servers = sorted(self._servers.values(), key=lambda server: server.first_rank)
        num_ranks = sum(server.num_ranks for server in servers)
        if any(num_ranks == server.num_ranks_of_all for server in servers):
            self._complete_s = -math.inf
        is_complete = time.monotonic() >= self._complete_s
        if not servers or self._places or not is_complete or self._here != self._servers.keys():
            return
        round_id, num_before = secrets.token_hex(4), 0
        for server in servers:
            self._places[server.server_id] = Place(round_id, num_ranks, num_before)
            num_before += server.num_ranks
        self._unseen, self._here = self._here, set()
        self._changed.notify_all()

    def _end(self, why: str) -> None:
        """End the present round, if there is one."""
        if self._places:
            self._why_over = why
            self._places, self._notes, self._unseen = {}, {}, set()
            self._changed.notify_all()

    def _forget(self, server_id: str, what: str) -> None:
        server = self._servers.pop(server_id, None)
        if server is not None:
            self._here.discard(server_id)
            if server_id in self._places:
                self._end(f"{server.label} {what}")
            self._begin()
            self._changed.notify_all()


def _ranks_of(server_id: str) -> str:
    return f"ranks of {server_id}"


COORDINATOR = actor_class(Coordinator, num_cpus=0, concurrency_groups={"waits": 4 * MAX_SERVERS, "tells": 1})
"""The Ray actor class."""
