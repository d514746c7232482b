"""What a rank tells clients whose calls change weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from configs import make_config
from fake_executor import FakeExecutor

from raycore.engine.mailbox import Utility
from raycore.engine.utilities import call_utility
from raycore.errors import InvalidCheckpoint, InvalidInput, InvalidRequest, WorkerFailed
from raycore.parts.transfers.connectors.identity import Identity
from raycore.parts.weights.engine import RankWeights


class Taker:
    """A worker that takes text, or raises what it gets."""

    def __init__(self, worker: int) -> None:
        self.rank = SimpleNamespace(worker=worker)

    def take(self, *given: Any) -> Any:
        for each in given:
            if isinstance(each, Exception):
                raise each
        return given


class Takers(FakeExecutor):
    """An executor of two such workers."""

    timeout_s: float | None = None

    def collective_rpc(self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> Any:
        self.timeout_s = timeout
        try:
            return [method(worker, *args) for worker in map(Taker, range(2))]
        except RuntimeError as error:
            raise WorkerFailed(0, f"RuntimeError: {error}", "traceback") from error


def weights_of(executor: FakeExecutor) -> RankWeights:
    scheduler = SimpleNamespace(reset_prefix_cache=lambda **_: True, take_identity=lambda digest: None)
    progress = SimpleNamespace(long_work=nullcontext)
    engine = SimpleNamespace(executor=executor, scheduler=scheduler, config=make_config(), progress=progress)
    return RankWeights(engine, Identity(engine.config))


def call(functions: Mapping[str, Callable[..., Any]], method: str, *args: Any) -> Any:
    command = Utility(method, args, {})
    call_utility(functions, command)
    return command.reply.result(0)


def test_calls_that_change_weights_tell_invalid_arguments_from_failures() -> None:
    executor = Takers()
    functions = weights_of(executor).calls()
    assert call(functions, "update_weights", "take", ["/path"], 7) == [("/path",), ("/path",)]
    assert executor.timeout_s == 7.0
    assert call(functions, "update_weights", "take", [["a", "b"]]) == [("a",), ("b",)], "each worker gets its own"
    refusals = [InvalidInput("no tensor: 'x'"), InvalidCheckpoint("Error: cut off"), InvalidRequest("a new kind")]
    for refusal in refusals:
        with pytest.raises(type(refusal), match=f"^{refusal}$"):
            call(functions, "update_weights", "take", [refusal])
    with pytest.raises(WorkerFailed, match="the trainer is gone"):
        call(functions, "update_weights", "take", [RuntimeError("the trainer is gone")])


@pytest.mark.parametrize("refusing", [0, 1])
def test_what_only_some_workers_refuse_has_changed_the_others(refusing: int) -> None:
    functions = weights_of(Takers()).calls()
    given: list[Any] = ["a", "a"]
    given[refusing] = InvalidInput("no segment 'x' on this node")
    with pytest.raises(WorkerFailed, match="InvalidInput: no segment 'x' on this node") as failed:
        call(functions, "update_weights", "take", [given])
    assert failed.value.rank == refusing
    assert not isinstance(failed.value, InvalidInput)
