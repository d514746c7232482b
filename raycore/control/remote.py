"""Finds and controls the engines of a Ray cluster, from any process that can join the cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from raycore.cluster.local import why_unreachable
from raycore.control.commands import ACTOR_PREFIX, NAMESPACE, Outcome, ScaleCommand
from raycore.errors import ControlError
from raycore.ray_api import actor_names, connect, disconnect, find_actor, get, wait
from raycore.same_copy import seal, unseal
from raycore.status import EngineStatus

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore.control.control_actor import EngineControl

T = TypeVar("T")

_ANSWER_S = 10.0
"""Timeout of a call to a control actor, which normally answers within milliseconds."""


@contextmanager
def connected(address: str) -> Generator[None, None, None]:
    """Join the cluster at `address` while the block runs.

    Args:
        address: `host:port`. Or `auto`: the cluster that RAY_ADDRESS names, or else the one that runs on this machine.

    Raises:
        ControlError: there is no such cluster.
    """
    asked = os.environ.get("RAY_ADDRESS") or address if address == "auto" else address
    if asked == "local":
        raise ControlError("address 'local' would start a new Ray cluster: give the address of the engine's cluster")
    if "://" in asked:
        raise ControlError(
            f"address {asked!r} isn't supported: run this on a node of the cluster, and give its address as HOST:PORT"
        )
    try:
        reason = None if asked == "auto" else why_unreachable(asked)
        if reason is not None:
            raise ConnectionError(reason)
        connect(asked, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ControlError(
            f"no Ray cluster at address {asked!r}: {error}\n"
            "Run this on a node of the engine's cluster, or name it with --address HOST:PORT"
        ) from error
    try:
        yield
    finally:
        disconnect()


def engine_names() -> list[str]:
    """Names of the engines of the cluster that this process is connected to, sorted."""
    return sorted(name.removeprefix(ACTOR_PREFIX) for name in actor_names() if name.startswith(ACTOR_PREFIX))


def choose_engine(names: list[str], wanted: str | None) -> str:
    """The name of the engine to use: `wanted`, or the only name in `names` if `wanted` is None.

    Raises:
        ControlError: no engine runs, the engine `wanted` doesn't run, or several engines run and `wanted` is None. The
            message has the names of the engines that run.
    """
    if not names:
        raise ControlError(
            "no engine runs in this Ray cluster; an engine can be reached from a few seconds after its start until "
            "its driver process ends"
        )
    if wanted is None and len(names) > 1:
        raise ControlError(f"{len(names)} engines run in this Ray cluster: choose with --name {' | '.join(names)}")
    if wanted is not None and wanted not in names:
        raise ControlError(f"no engine {wanted!r} runs in this Ray cluster; running: {', '.join(names)}")
    return wanted or names[0]


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

    def scale(self, data_parallel_size: int, drain_timeout_s: float | None) -> None:
        """Scale the engine; see `LLM.scale`.

        Raises:
            ControlError: the engine refused the command or failed to scale, with the engine's own message. Or the
                engine's program doesn't answer, or runs another copy of raycore.
        """
        command = msgspec.msgpack.encode(ScaleCommand(data_parallel_size, drain_timeout_s))
        asked = self._actor.execute.remote(seal(command))
        # scaling may take minutes: wait as long as the control actor answers
        while not wait([asked], timeout_s=_ANSWER_S)[0]:
            self.status()
        data = self._get(asked)
        if data is None:
            raise ControlError(
                f"engine {self._name}'s driver process doesn't answer. If it recovers, it may still scale the engine: "
                "see `raycore status`"
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
