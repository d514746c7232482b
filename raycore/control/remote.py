"""Finds the engines of a Ray cluster, and reaches them, from any process that can join the cluster."""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from raycore.cluster.local import is_listening
from raycore.control.commands import ACTOR_PREFIX, NAMESPACE, Outcome, ScaleCommand
from raycore.errors import ControlError
from raycore.status import EngineStatus

_ANSWER_S = 10.0
"""A control actor answers within milliseconds, a resting one within a second."""


@contextmanager
def connected(address: str) -> Generator[None, None, None]:
    """Join the cluster at `address` (`host:port`, or `auto`: this machine's) while the block runs.

    Raises:
        ControlError: there is none.
    """
    asked = os.environ.get("RAY_ADDRESS") or address if address == "auto" else address
    if asked == "local":
        raise ControlError("address 'local' would start a Ray of its own: name the cluster of the engine")
    if "://" in asked:
        raise ControlError(f"address {asked!r}: give the cluster's own, HOST:PORT, and run this on one of its nodes")
    try:
        if asked != "auto" and not is_listening(asked):
            raise ConnectionError("nothing listens there")
        ray.init(address=asked, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ControlError(
            f"no Ray cluster at address {asked!r}: {error}\n"
            "Run this on a node of the engine's cluster, or name it with --address HOST:PORT"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def engine_names() -> list[str]:
    """The engines of the cluster that this process is connected to."""
    names: list[str] = ray.util.list_named_actors()
    return sorted(name.removeprefix(ACTOR_PREFIX) for name in names if name.startswith(ACTOR_PREFIX))


def choose_engine(names: list[str], wanted: str | None) -> str:
    """The one that is meant.

    Raises:
        ControlError: that isn't clear, or it isn't there; with the names that are.
    """
    if not names:
        raise ControlError(
            "no engine runs in this Ray cluster; one can be reached from a few seconds after it has come up until its "
            "program ends"
        )
    if wanted is None and len(names) > 1:
        raise ControlError(f"{len(names)} engines run in this Ray cluster: choose with --name {' | '.join(names)}")
    if wanted is not None and wanted not in names:
        raise ControlError(f"no engine {wanted!r} runs in this Ray cluster; there is {', '.join(names)}")
    return wanted or names[0]


class RemoteEngine:
    """An engine that another process runs."""

    def __init__(self, name: str) -> None:
        self._name = name
        try:
            self._actor: Any = ray.get_actor(f"{ACTOR_PREFIX}{name}", NAMESPACE)
        except ValueError as error:
            raise self._ended() from error

    def status(self) -> tuple[EngineStatus, bool]:
        """The engine as its program last saw it, and whether that program still answers.

        Raises:
            ControlError: the engine has ended, or has yet to say anything of itself.
        """
        data, is_answering = self._get(self._actor.status.remote())
        if data is None:
            raise ControlError(f"engine {self._name} is only just there, and has yet to say anything of its ranks")
        return msgspec.msgpack.decode(data, type=EngineStatus), is_answering

    def scale(self, data_parallel_size: int, drain_timeout_s: float | None) -> None:
        """See `LLM.scale`: the same, for an engine elsewhere.

        Raises:
            ControlError: it was refused, or has failed, with the engine's own message; or nobody answers.
        """
        command = msgspec.msgpack.encode(ScaleCommand(data_parallel_size, drain_timeout_s))
        asked = self._actor.execute.remote(command)
        # it may take minutes: as many as it likes while both processes live
        while not ray.wait([asked], timeout=_ANSWER_S)[0]:
            self.status()
        data = self._get(asked)
        if data is None:
            raise ControlError(f"the program of engine {self._name} doesn't answer; it may scale when it goes on")
        error = msgspec.msgpack.decode(data, type=Outcome).error
        if error is not None:
            raise ControlError(error)

    def _get(self, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=_ANSWER_S)
        except GetTimeoutError as error:
            raise ControlError(f"engine {self._name}'s control actor hasn't answered for {_ANSWER_S:g} s") from error
        except RayActorError as error:
            raise self._ended() from error
        except RayError as error:
            raise ControlError(f"engine {self._name} can't be reached: {error}") from error

    def _ended(self) -> ControlError:
        return ControlError(f"engine {self._name} has ended")
