"""Finds and controls running engines, from any process that can join their Ray cluster."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from raycore.control.clusters import clusters_to_search, connected
from raycore.control.commands import ACTOR_PREFIX, NAMESPACE, CallCommand, CommandOutcome
from raycore.errors import ControlError
from raycore.ray_api import actor_names, cluster_address, find_actor, get, wait
from raycore.same_copy import seal, unseal
from raycore.status import EngineStatus, FoundEngine

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore.control.control_actor import EngineControl

T = TypeVar("T")
Answer = tuple[bytes, bool]

_ANSWER_S = 10.0
"""Timeout of a call to a control actor, which normally answers within milliseconds."""

_ROW_S = 5.0
"""The same when several engines are asked: the answers of the others shouldn't have to wait for long."""


def engine_names() -> list[str]:
    """Names of the engines of the cluster that this process is connected to, sorted."""
    return sorted(name.removeprefix(ACTOR_PREFIX) for name in actor_names() if name.startswith(ACTOR_PREFIX))


def find_engines(address: str, name: str | None, command: str) -> list[FoundEngine]:
    """Ask engines for their status, those of a cluster at the same time.

    Args:
        address: see `clusters_to_search`.
        name: only engines of this name. None: all.
        command: the command line that asks, for messages.

    Raises:
        ControlError: there is no such cluster or no such engine. The message has the addresses at which engines were
            looked for, and the engines that run there.
    """
    found, searched, unreachable = list[FoundEngine](), list[str](), list[str]()
    for each in clusters_to_search(address):
        try:
            with connected(each):
                searched.append(cluster_address())
                found += ask_engines(name)
        except ControlError as error:
            unreachable.append(str(error))
    if not searched:
        raise ControlError("\n".join(unreachable))
    matching = [each for each in found if name in (None, each.name)]
    if not matching:
        choose_engine(found, name, _where(searched), command, unreachable)
    return matching


def ask_engines(name: str | None) -> list[FoundEngine]:
    """The engines of the cluster that this process is connected to. Those called `name`, or all, are asked for their
    status, at the same time.
    """
    here = cluster_address()
    found = {each: FoundEngine(here, each) for each in engine_names()}
    asked: dict[ObjectRef[Answer], RemoteEngine] = {}
    for each in found if name is None else {name} & found.keys():
        try:
            engine = RemoteEngine(each)
            asked[engine.ask_status()] = engine
        except ControlError as error:
            found[each] = replace(found[each], problem=str(error))
    timeout_s = _ROW_S if len(asked) > 1 else _ANSWER_S
    answered = wait(list(asked), num_returns=len(asked), timeout_s=timeout_s)[0] if asked else []
    for ref, engine in asked.items():
        status, problem = None, f"engine {engine.name}'s control actor hasn't answered for {timeout_s:g} s"
        if ref in answered:
            status, problem = _answer_of(engine, ref)
        found[engine.name] = replace(found[engine.name], status=status, problem=problem)
    return list(found.values())


def _answer_of(engine: RemoteEngine, ref: ObjectRef[Answer]) -> tuple[EngineStatus | None, str | None]:
    """An engine's status, and what is wrong with the engine: see `FoundEngine`."""
    try:
        status, is_answering = engine.read_status(ref)
    except ControlError as error:
        return None, str(error)
    if not is_answering:
        silent = f"engine {engine.name}: this is the last known status: the engine's driver process doesn't respond"
        return status, silent
    return status, None if status.failure is None else f"engine {engine.name} has failed: {status.failure}"


def _where(addresses: Sequence[str]) -> str:
    """The places that were searched, for messages."""
    if len(addresses) == 1:
        return f"in the Ray cluster at {addresses[0]}"
    return f"in the Ray clusters of this machine, at {', '.join(addresses)}"


@contextmanager
def reached(address: str, name: str | None, command: str) -> Generator[RemoteEngine, None, None]:
    """Join the cluster of an engine while the block runs. Yields the engine.

    Args:
        address: see `clusters_to_search`.
        name: the engine's name. None: there is only one.
        command: the command line that needs an engine, for messages.

    Raises:
        ControlError: there is no such cluster, or not exactly one such engine. The message has the addresses at which
            engines were looked for, and the engines that run there.
    """
    addresses, unreachable = clusters_to_search(address), list[str]()
    if len(addresses) > 1:
        found: list[FoundEngine] = []
        for each in addresses:
            try:
                with connected(each):
                    found += [FoundEngine(each, other) for other in engine_names()]
            except ControlError as error:
                unreachable.append(str(error))
        chosen = choose_engine(found, name, _where(addresses), command, unreachable)
        addresses, name = [chosen.address], chosen.name
    with connected(addresses[0]):
        here = cluster_address()
        found = [FoundEngine(here, each) for each in engine_names()]
        yield RemoteEngine(choose_engine(found, name, _where([here]), command).name)


def choose_engine(
    found: Sequence[FoundEngine], wanted: str | None, where: str, command: str, unreachable: Sequence[str] = ()
) -> FoundEngine:
    """The engine to use: the one that is named `wanted`, or the only one if `wanted` is None.

    Args:
        found: the engines that run.
        where: the places that were searched, for messages.
        command: the command line that needs an engine, for messages.
        unreachable: what is to be said of clusters that couldn't be searched.

    Raises:
        ControlError: there is no such engine, or there are several. The message has the engines that run.
    """
    if not found:
        told = (
            f"no engine runs {where}; an engine can be reached from a few seconds after its start until its driver "
            "process ends"
        )
        raise ControlError("\n".join([told, *unreachable]))
    matching = [each for each in found if wanted in (None, each.name)]
    if len(matching) == 1:
        return matching[0]
    listed = matching or found
    lines = [f"  {command} --address {each.address} --name {each.name}" for each in listed]
    what = f"{len(listed)} engines run {where}" if matching else f"no engine {wanted!r} runs {where}, but others do"
    raise ControlError("\n".join([f"{what}. Choose one:", *lines, *unreachable]))


class RemoteEngine:
    """An engine that runs in another process."""

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self._actor: EngineControl = find_actor(f"{ACTOR_PREFIX}{name}", NAMESPACE)
        except ValueError as error:
            raise self._ended() from error

    def status(self) -> tuple[EngineStatus, bool]:
        """The status that the engine's program last published, and whether the program still polls for commands.

        Raises:
            ControlError: the engine has ended, or runs another copy of raycore.
        """
        return self.read_status(self.ask_status())

    def ask_status(self) -> ObjectRef[Answer]:
        """Ask for the status. Returns at once."""
        return self._actor.status.remote()

    def read_status(self, ref: ObjectRef[Answer]) -> tuple[EngineStatus, bool]:
        """The answer to `ask_status()`: see `status()`."""
        data, is_answering = self._get(ref)
        return msgspec.msgpack.decode(self._unseal(data), type=EngineStatus), is_answering

    def call(self, method: str, **arguments: Any) -> None:
        """Make a call on the engine: see the method of `EngineCalls`. It has to be one of `calls.REMOTE_CALLS`.

        Raises:
            ControlError: the engine refused the call or the call failed, with the engine's own message. Or the engine's
                program doesn't answer, or runs another copy of raycore.
        """
        command = msgspec.msgpack.encode(CallCommand(method, arguments))
        asked = self._actor.execute.remote(seal(command))
        # it may take minutes: wait as long as the control actor answers
        while not wait([asked], timeout_s=_ANSWER_S)[0]:
            self.status()
        data = self._get(asked)
        if data is None:
            raise ControlError(
                f"engine {self.name}'s driver process doesn't answer. If it recovers, it may still {method} the "
                "engine: see `raycore status`"
            )
        error = msgspec.msgpack.decode(self._unseal(data), type=CommandOutcome).error
        if error is not None:
            raise ControlError(error)

    def _get(self, ref: ObjectRef[T]) -> T:
        try:
            return get(ref, timeout_s=_ANSWER_S)
        except GetTimeoutError as error:
            raise ControlError(f"engine {self.name}'s control actor hasn't answered for {_ANSWER_S:g} s") from error
        except RayActorError as error:
            raise self._ended() from error
        except RayError as error:
            raise ControlError(f"engine {self.name}'s control actor can't be reached: {error}") from error

    def _unseal(self, data: bytes) -> bytes:
        return unseal(data, f"the driver of engine {self.name}", ControlError)

    def _ended(self) -> ControlError:
        return ControlError(f"engine {self.name} has ended")
