"""The functions of an engine that clients call by name, between two steps.

`Utilities` has the table. `call_utility` converts the arguments to the types in a function's signature.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

import msgspec

from raycore.config import EngineConfig
from raycore.config.profiler import checked_prefix, session_config
from raycore.engine.engine_profile import EngineProfile
from raycore.engine.mailbox import Utility
from raycore.engine.part import EnginePart
from raycore.errors import InvalidInput, WorkerFailed
from raycore.executor.base import Executor
from raycore.messages import LoadView
from raycore.plain_errors import decode_problem
from raycore.scheduler.protocol import SchedulerProtocol
from raycore.system import Future
from raycore.worker.rank import MemoryNeed


class Utilities:
    """The utilities of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        scheduler: SchedulerProtocol,
        profile: EngineProfile,
        num_blocks: int,
        load: Callable[[], LoadView],
        parts: Iterable[EnginePart] = (),
    ) -> None:
        self._config = config
        self._executor = executor
        self._scheduler = scheduler
        self._profile = profile
        self._num_blocks = num_blocks
        self.functions: dict[str, Callable[..., Any]] = {
            "check_health": executor.check_health,
            "load": load,
            "memory_need": self._memory_need,
            "profile": self._switch_profile,
            "reset_encoder_cache": _do_nothing,
            "reset_mm_cache": _do_nothing,
            "reset_prefix_cache": self._reset_prefix_cache,
            "save_sharded_state": self._save_sharded_state,
        }
        """By name: what clients may call."""
        for part in parts:
            self.functions |= part.calls()

    # the signatures say what clients may pass, and to which types it is converted

    def _reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return self._scheduler.reset_prefix_cache(reset_running_requests)

    def _memory_need(self, num_ranks: int, num_local_workers: list[int]) -> list[MemoryNeed]:
        return self._executor.collective_rpc("memory_need", args=(num_ranks, num_local_workers, self._num_blocks))

    def _save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        kwargs = {"path": path, "pattern": pattern, "max_size": max_size}
        self._executor.collective_rpc("save_sharded_state", self._config.executor.init_timeout_s, kwargs=kwargs)

    def _switch_profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Start or end a profile of the engine and its workers, each of which writes a file.

        Raises:
            InvalidInput: an argument is invalid, or a profile is running.
            OSError: the engine's file can't be written.
            WorkerFailed: a worker's file can't be written.
        """
        config = session_config(self._config.profiler_config, delay_iterations, max_iterations)
        if not is_start:
            try:
                self._executor.collective_rpc("profile", args=(False,))
            finally:
                self._profile.stop()
            return
        self._profile.start(config, checked_prefix(profile_prefix))
        try:
            self._executor.collective_rpc("profile", args=(True, profile_prefix, delay_iterations, max_iterations))
        except BaseException:
            self._profile.stop()
            with suppress(WorkerFailed):  # some workers may have started theirs
                self._executor.collective_rpc("profile", args=(False,))
            raise


def _do_nothing() -> None:
    """Reset what the engine doesn't have: a model of text keeps nothing of images."""


def call_utility(functions: Mapping[str, Callable[..., Any]], command: Utility) -> None:
    """Call the function that `command` names. Its result or exception becomes the command's reply.

    If the function returns a future, that is done later, the reply is the future's.
    """
    try:
        result = _call(functions, command)
    except Exception as error:
        # the caller gets the exception: an error in a utility must not end the engine
        command.reply.set_exception(error)
        return
    if isinstance(result, Future):
        cast("Future[Any]", result).add_done_callback(lambda done: _pass_on(done, command.reply))
    else:
        command.reply.set_result(result)


def _pass_on(done: Future[Any], reply: Future[Any]) -> None:
    error = done.exception()
    if error is None:
        reply.set_result(done.result())
    else:
        reply.set_exception(error)


def _call(functions: Mapping[str, Callable[..., Any]], command: Utility) -> Any:
    function = functions.get(command.method)
    if function is None:
        known = ", ".join(sorted(functions))
        raise InvalidInput(f"the engine has no method {command.method!r}; it has {known}")
    try:
        bound = inspect.signature(function).bind(*command.args, **command.kwargs)
    except TypeError as error:
        raise InvalidInput(f"{command.method}(): {error}") from None
    hints = typing.get_type_hints(function)
    for name, value in bound.arguments.items():
        bound.arguments[name] = _convert(command.method, name, value, hints.get(name, Any))
    return function(*bound.args, **bound.kwargs)


def _convert(method: str, name: str, value: Any, wanted: Any) -> Any:
    """Convert `value` to the type `wanted`, for example a list to a tuple or a mapping to a Struct."""
    if wanted is Any:
        return value
    try:
        return msgspec.convert(value, wanted, strict=False)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidInput(f"{method}(): {name}={value!r}: {decode_problem(error)}") from None
