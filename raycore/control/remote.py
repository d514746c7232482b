"""Finds and controls running engines, from any process that can join their Ray cluster."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from raycore.control.clusters import clusters_to_search, connected
from raycore.control.commands import ACTOR_PREFIX, NAMESPACE, CallCommand, Outcome
from raycore.errors import ControlError
from raycore.ray_api import actor_names, cluster_address, find_actor, get, wait
from raycore.same_copy import seal, unseal
from raycore.status import EngineStatus

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore.control.control_actor import EngineControl

T = TypeVar("T")

_ANSWER_S = 10.0
"""Timeout of a call to a control actor, which normally answers within milliseconds."""


def engine_names() -> list[str]:
    """Names of the engines of the cluster that this process is connected to, sorted."""
    return sorted(name.removeprefix(ACTOR_PREFIX) for name in actor_names() if name.startswith(ACTOR_PREFIX))


class FoundEngine(NamedTuple):
    """An engine that runs."""

    address: str
    """That of its Ray cluster."""
    name: str


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
        where = f"in the Ray clusters of this machine, at {', '.join(addresses)}"
        try:
            chosen = choose_engine(found, name, where, command)
        except ControlError as error:
            raise ControlError("\n".join([str(error), *unreachable])) from error
        addresses, name = [chosen.address], chosen.name
    with connected(addresses[0]):
        here = cluster_address()
        found = [FoundEngine(here, each) for each in engine_names()]
        yield RemoteEngine(choose_engine(found, name, f"in the Ray cluster at {here}", command).name)


def choose_engine(found: Sequence[FoundEngine], wanted: str | None, where: str, command: str) -> FoundEngine:
    """The engine to use: the one that is named `wanted`, or the only one if `wanted` is None.

    Args:
        found: the engines that run.
        where: the places that were searched, for messages.
        command: the command line that needs an engine, for messages.

    Raises:
        ControlError: there is no such engine, or there are several. The message has the engines that run.
    """
    if not found:
        raise ControlError(
            f"no engine runs {where}; an engine can be reached from a few seconds after its start until its driver "
            "process ends"
        )
    matching = [each for each in found if wanted in (None, each.name)]
    if len(matching) == 1:
        return matching[0]
    listed = matching or found
    lines = [f"  {command} --address {each.address} --name {each.name}" for each in listed]
    what = f"{len(listed)} engines run {where}" if matching else f"no engine {wanted!r} runs {where}, but others do"
    raise ControlError("\n".join([f"{what}. Choose one:", *lines]))


class RemoteEngine:
    """An engine that runs in another process."""

    def __init__(self, name: str) -> None:
        self._name = name
        try:
            self._actor: EngineControl = find_actor(f"{ACTOR_PREFIX}{name}", NAMESPACE)
        except ValueError as error:
            raise self._ended() from error

    def status(self) -> tuple[EngineStatus, bool]:
        """The status that the engine's program last published, and whether the program still polls for commands.

        Raises:
            ControlError: the engine has ended, or runs another copy of raycore.
        """
        data, is_answering = self._get(self._actor.status.remote())
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
                f"engine {self._name}'s driver process doesn't answer. If it recovers, it may still {method} the "
                "engine: see `raycore status`"
            )
        error = msgspec.msgpack.decode(self._unseal(data), type=Outcome).error
        if error is not None:
            raise ControlError(error)

    def _get(self, ref: ObjectRef[T]) -> T:
        try:
            return get(ref, timeout_s=_ANSWER_S)
        except GetTimeoutError as error:
            raise ControlError(f"engine {self._name}'s control actor hasn't answered for {_ANSWER_S:g} s") from error
        except RayActorError as error:
            raise self._ended() from error
        except RayError as error:
            raise ControlError(f"engine {self._name}'s control actor can't be reached: {error}") from error

    def _unseal(self, data: bytes) -> bytes:
        return unseal(data, f"the driver of engine {self._name}", ControlError)

    def _ended(self) -> ControlError:
        return ControlError(f"engine {self._name} has ended")
