"""A server's part in rounds of ranks that share experts with those of other servers.

`Servers` is what the manager of ranks knows: an engine that shares experts with no other server begins every round
alone, at once. `SharingServers` asks the coordinator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raycore.cluster.following import IsWanted, Wait, check_wanted, no_wait
from raycore.config import EngineConfig
from raycore.errors import InitializationError, InvalidInput, RaycoreError
from raycore.parts.servers.cluster.coordinator import COORDINATOR, NAMESPACE, Coordinator
from raycore.parts.servers.values import Place, RoundOver, SharingServer
from raycore.ray_api import as_argument, cause_of, find_actor, has_ended, kill, node_id, on_node, own_worker_id
from raycore.same_copy import seal
from raycore.system import secrets, threading

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore.cluster.rank import Rank
    from raycore.cluster.runtime import Runtime
    from raycore.engine.engine_actor import DPEngineCoreActor

T = TypeVar("T")

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""How long, in seconds, the coordinator is asked to wait at a time."""
_ANSWER_S = 30.0
"""How much longer it may take to answer, in seconds, while Ray's control store is away, for example."""
_RETRY_S = 0.5
_END_TIMEOUT_S = 5.0
_COORDINATOR_ENDED = "the server that coordinated all others has ended"


class Servers:
    """An engine whose ranks share experts with no ranks of other servers. Thread-safe."""

    def gather(self, config: EngineConfig, is_wanted: IsWanted) -> EngineConfig:
        """Wait until the next round of ranks begins. Called before all ranks of the engine are created.

        Args:
            config: the ranks' configuration.
            is_wanted: called several times a second. If it returns False, the ranks aren't wanted any more.

        Returns: the configuration that they have in this round.

        Raises:
            InitializationError: the other servers didn't come, or the ranks aren't wanted any more.
            InvalidConfig: this server doesn't fit the others.
        """
        return config

    def shared(self, key: str, make: Callable[[], T]) -> T:
        """Return what `make` returns on the first server of the round, as an argument of calls. Returns at once."""
        return make()

    def others(self, ranks: Sequence[Rank]) -> tuple[list[list[DPEngineCoreActor]], Wait]:
        """Tell the other servers of the round which ranks these are. Called once, when all of this server are up.

        Returns, at once: arguments of `DPEngineCoreActor.run()` in addition to its peers of this engine, and what waits
        until the ranks of all other servers are up, too. It raises RoundOver if they won't be.
        """
        return [], no_wait

    def check(self) -> None:
        """Raise RoundOver if ranks that are starting can't go on. Called several times a second."""

    def begins_anew(self, why: str) -> bool:
        """Whether ranks that have failed to start should start once more, because those of another server were the
        first that failed. `why`: how these have failed."""
        return False

    def check_alone(self) -> None:
        """Raise InvalidInput if ranks of other servers would have to change their activity together with these."""

    def on_over(self, told: Callable[[str], object]) -> None:
        """Have `told` called with the reason, again and again, while ranks run whose round is over."""

    def end_round(self, why: str) -> None:
        """Tell the other servers that the ranks of this one have ended, and are going to be replaced."""

    def close(self) -> None:
        """Leave the other servers for good. Idempotent. Needs a connection to Ray."""


class SharingServers(Servers):
    """A server whose ranks share experts with those of others."""

    def __init__(
        self, config: EngineConfig, runtime: Runtime, find: Callable[[str], Coordinator] | None = None
    ) -> None:
        """`find`: returns the coordinator by its name. None: Ray's actor."""
        self._id = secrets.token_hex(4)
        self._parallel = config.parallel
        self._options = _equal_options(config)
        self._timeout_s = config.executor.init_timeout_s
        self._runtime = runtime
        self._find = find or self._find_actor
        self._name = f"servers-{config.parallel.data_parallel_rpc_port or 0}"
        self._found: Coordinator | None = None
        self._created: Coordinator | None = None
        """The coordinator, if it is this server's."""
        self._of_round: Coordinator
        """The coordinator that has begun the present round."""
        self._place: Place | None = None
        """This server's place in the round of the ranks that run or start; None before the first."""
        self._over: tuple[str, str] | None = None
        """The latest round that is over, and why."""
        self._told: Callable[[str], object] = lambda why: None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def gather(self, config: EngineConfig, is_wanted: IsWanted) -> EngineConfig:
        coordinator, place = self._come(is_wanted)
        self._of_round, self._place = coordinator, place
        own = range(place.num_before, place.num_before + self._parallel.data_parallel_size)
        logger.info("%d ranks share experts: this server has %s", place.num_ranks, list(own))
        if self._thread is None:
            self._thread = self._runtime.clock.start_thread("raycore-servers", self._watch)
        parallel = msgspec.structs.replace(
            config.parallel, num_ranks_of_servers=place.num_ranks, num_ranks_before=place.num_before
        )
        return msgspec.structs.replace(config, parallel=parallel)

    def shared(self, key: str, make: Callable[[], T]) -> T:
        place, coordinator = self._present(), self._of_round
        if not place.is_first:
            return as_argument(coordinator.told.remote(place.round_id, key))
        value = make()
        coordinator.tell.remote(place.round_id, key, value)
        return value

    def others(self, ranks: Sequence[Rank]) -> tuple[list[list[DPEngineCoreActor]], Wait]:
        asked = self._of_round.others.remote(self._present().round_id, self._id, [rank.actor for rank in ranks])
        return [as_argument(asked)], partial(self._wait_for_others, asked)

    def _wait_for_others(self, asked: ObjectRef[Any], deadline_s: float, is_wanted: IsWanted) -> None:
        """Before, no step can run, and nobody may send the ranks requests or ask how long they take."""
        while not self._runtime.wait([asked], timeout_s=_RETRY_S)[0]:
            check_wanted(is_wanted)
            if self._runtime.clock.now_s() > deadline_s:
                raise InitializationError(
                    f"the ranks of the other servers weren't up within init_timeout_s={self._timeout_s:g}"
                )
        try:
            self._ask(self._of_round, asked)
        except _CoordinatorLost:
            raise RoundOver(f"the ranks can't start: {_COORDINATOR_ENDED}") from None

    def check(self) -> None:
        if self._over is not None and self._over[0] == self._present().round_id:
            raise RoundOver(f"the ranks can't start: {self._over[1]}")

    def begins_anew(self, why: str) -> bool:
        place = self._present()
        try:
            # a worker that fails because of another one waits a second before it says so
            return self._ask(self._of_round, self._of_round.end.remote(place.round_id, why)) is False
        except _CoordinatorLost:
            return True

    def check_alone(self) -> None:
        raise InvalidInput(
            "the ranks share experts with those of other servers, and step together with them: one server alone can't "
            "pause, sleep or change its weights"
        )

    def on_over(self, told: Callable[[str], object]) -> None:
        self._told = told

    def end_round(self, why: str) -> None:
        if self._place is not None:
            self._of_round.end.remote(self._place.round_id, why)

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        if self._found is not None:
            left = self._found.leave.remote(self._id)
            self._runtime.wait([left], timeout_s=_END_TIMEOUT_S)
        if self._created is not None:
            kill(self._created)

    def _come(self, is_wanted: IsWanted) -> tuple[Coordinator, Place]:
        clock = self._runtime.clock
        deadline_s = clock.now_s() + self._timeout_s
        server = seal(msgspec.msgpack.encode(self._introduction()))
        while clock.now_s() < deadline_s:
            check_wanted(lambda: is_wanted() and not self._closing.is_set())
            try:
                coordinator = self._coordinator()
                place = self._ask(coordinator, coordinator.come.remote(server, _POLL_S))
                if place is not None:
                    return coordinator, place
            except _CoordinatorLost:
                clock.wait(self._closing, _RETRY_S)
        raise InitializationError(
            f"the other servers of data_parallel_size={self._parallel.num_ranks_of_servers} haven't come within "
            f"init_timeout_s={self._timeout_s:g}: start them, with the same data_parallel_rpc_port if they have one"
        )

    def _watch(self) -> None:
        """Notice the end of each round. Runs on a thread of its own."""
        while not self._closing.is_set():
            place = self._present()
            try:
                coordinator = self._coordinator()
                why = self._ask(coordinator, coordinator.watch.remote(place.round_id, _POLL_S))
            except _CoordinatorLost:
                why = _COORDINATOR_ENDED
            except RaycoreError as error:
                why = str(error)
            if why:
                self._over = place.round_id, why
                if self._place is place:
                    self._told(f"the servers that share experts begin anew: {why}")
                self._runtime.clock.wait(self._closing, _RETRY_S)

    def _ask(self, coordinator: Coordinator, asked: ObjectRef[T]) -> T | None:
        """Wait for an answer of the coordinator. Returns None if there is none in time.

        Raises:
            _CoordinatorLost: it has ended.
            RaycoreError: what it raised.
        """
        try:
            return self._runtime.get(asked, _POLL_S + _ANSWER_S)
        except GetTimeoutError:
            return None
        except RayTaskError as error:
            cause = cause_of(error)
            if isinstance(cause, RaycoreError):
                raise cause from None
            logger.warning("the coordinator of the servers failed: %s", error)
            return None
        except RayError as error:
            if not has_ended(error):
                raise
            with self._lock:
                if self._found is coordinator:
                    self._found = self._created = None
            raise _CoordinatorLost from error

    def _coordinator(self) -> Coordinator:
        """Find the coordinator. Raises _CoordinatorLost if it is about to be created."""
        with self._lock:
            if self._found is None:
                self._found = self._find(self._name)
            return self._found

    def _find_actor(self, name: str) -> Coordinator:
        """The coordinator, which is created if there is none."""
        with suppress(ValueError):  # there is none
            return find_actor(name, NAMESPACE)
        own = on_node(node_id())  # a failure of this node ends it, too
        try:
            made = COORDINATOR.options(name=name, namespace=NAMESPACE, scheduling_strategy=own).remote(name)
        except ValueError as error:  # another server has created it meanwhile
            raise _CoordinatorLost from error
        self._created = made
        return made

    def _present(self) -> Place:
        assert self._place is not None, "gather() comes first"
        return self._place

    def _introduction(self) -> SharingServer:
        parallel = self._parallel
        return SharingServer(
            self._id,
            parallel.first_rank,
            parallel.data_parallel_size,
            parallel.num_ranks_of_servers,
            has_served=self._place is not None,
            worker_id=own_worker_id(),
            node_id=node_id(),
            options=self._options,
        )


class _CoordinatorLost(Exception):
    """The coordinator has ended."""


def _equal_options(config: EngineConfig) -> dict[str, str]:
    """The options that servers that share experts have in common, as texts."""
    model, parallel = config.model, config.parallel
    values = {
        "the model": model.spec,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "cpu_activation_dtype": model.cpu_activation_dtype,
        "batch_invariant": model.batch_invariant,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "pipeline_layers": parallel.pipeline_layers,
        "dp_sync_interval": parallel.dp_sync_interval,
        "the number of steps in flight": config.max_steps_in_flight,
        "device": config.device,
    }
    return {name: repr(value) for name, value in values.items()}


def servers_of(config: EngineConfig, runtime: Runtime) -> Servers:
    """What an engine shares experts with besides its own ranks."""
    return SharingServers(config, runtime) if config.parallel.num_ranks_of_servers else Servers()
