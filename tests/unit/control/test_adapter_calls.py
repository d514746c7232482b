"""What the driver does to add adapters, with ranks that only take notes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError
from replies_of_ranks import use_futures
from waiting import LONG_S

from raycore.activity import RUNNING
from raycore.cluster.desired import Desired, DesiredNow, DesiredWeights
from raycore.config import LoRAConfig
from raycore.errors import EngineDeadError, InvalidAdapter, InvalidInput, InvalidRequest, RpcTimeout
from raycore.lora.request import LoRARequest
from raycore.messages import FIRST_WEIGHTS
from raycore.parts.adapters.control import AdapterCalls
from raycore.parts.adapters.values import AddedAdapters

A, B = LoRARequest("a", 1, "/a"), LoRARequest("b", 2, "/b")


class Engine:
    """Ranks 0 and 1, the manager, the supervisor and the client. `log` has what the ranks were asked, in order."""

    def __init__(self, timeout_s: float = LONG_S) -> None:
        self.log: list[tuple[int, str, Any]] = []
        self.answers: dict[tuple[int, str], Callable[[], Future[Any]]] = {}
        """By dp_rank and method: makes the reply."""
        running: list[Any] = [self._rank(dp_rank) for dp_rank in (0, 1)]
        self.desired = DesiredNow(Desired(DesiredWeights(FIRST_WEIGHTS, "/model")), lambda: running)
        self.has_ended = False
        self.reported: list[int] = []
        config = SimpleNamespace(
            lora=LoRAConfig(enable_lora=True, max_cpu_loras=2), executor=SimpleNamespace(execute_timeout_s=timeout_s)
        )
        self.checks = SimpleNamespace(adapters=self)
        self.calls = AdapterCalls(self, self, self, config)  # type: ignore[arg-type]

    @property
    def adapters(self) -> AddedAdapters:
        return self.desired.now.adapters

    def _rank(self, dp_rank: int) -> Any:
        def remote(method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> Future[Any]:
            assert self.desired.is_changing
            self.log.append((dp_rank, method, args[0]))
            return self.answers.get((dp_rank, method), lambda: replied({} if method == "sync_adapters" else None))()

        actor = SimpleNamespace(utility=SimpleNamespace(remote=remote))
        return SimpleNamespace(dp_rank=dp_rank, actor=actor, run_ref=object())

    def wait(self, timeout_s: float) -> EngineDeadError | None:
        return None

    def report(self, dp_rank: int, reason: str) -> None:
        self.reported.append(dp_rank)

    def check_new(self, adapter: LoRARequest) -> None:
        if not adapter.lora_path.startswith("/"):
            raise InvalidAdapter("not a path")

    def methods(self, dp_rank: int) -> list[str]:
        found = [method for rank, method, _ in self.log if rank == dp_rank]
        self.log.clear()
        return found


def replied(value: Any) -> Future[Any]:
    reply = Future[Any]()
    reply.set_result(value)
    return reply


def raised(error: Exception) -> Future[Any]:
    reply = Future[Any]()
    is_lost = isinstance(error, RayActorError)
    reply.set_exception(error if is_lost else RayTaskError("utility", "traceback", error).as_instanceof_cause())
    return reply


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    use_futures(monkeypatch)
    return Engine()


BOTH = ["begin_adapter", "sync_adapters"]


def test_all_ranks_read_an_adapter_before_it_is_added(engine: Engine) -> None:
    engine.calls.add(A)
    assert [method for _, method, _ in engine.log] == [BOTH[0]] * 2 + [BOTH[1]] * 2
    assert engine.adapters.ids() == [1]
    assert engine.calls.ids() == {1}
    assert not engine.desired.is_changing
    # once more: ranks that have dropped it read it again
    assert not engine.calls.add(A)
    assert engine.log[-1][2] == engine.adapters


def test_a_replaced_adapter_gets_a_new_revision_and_stays_pinned(engine: Engine) -> None:
    engine.calls.add(A)
    first = engine.adapters.find(1)
    assert engine.calls.pin(1)
    assert engine.calls.add(LoRARequest("a", 1, "/elsewhere", load_inplace=True))
    second = engine.adapters.find(1)
    assert first is not None
    assert second is not None
    assert first.revision < second.revision
    assert (first.is_pinned, first.is_replacement, second.is_pinned, second.is_replacement) == (0, 0, 1, 1)
    assert second.adapter == LoRARequest("a", 1, "/elsewhere")
    assert engine.calls.remove(1)
    assert not engine.calls.remove(1)
    assert engine.calls.ids() == set()


@pytest.mark.parametrize("error", [InvalidAdapter("it is damaged"), InvalidInput("no slot")])
def test_an_adapter_that_one_rank_cannot_read_is_added_to_no_rank(engine: Engine, error: InvalidInput) -> None:
    engine.answers[1, "begin_adapter"] = lambda: raised(error)
    with pytest.raises(type(error), match=rf"add_lora\('a'\): dp_rank 1: {error}"):
        engine.calls.add(A)
    assert engine.methods(0) == ["begin_adapter", "give_up_adapter"]
    assert engine.calls.ids() == set()


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("error", [RayActorError(), EngineDeadError("the engine stopped before begin_adapter() ran")])
def test_a_rank_lost_while_an_adapter_is_added_is_no_error(engine: Engine, method: str, error: Exception) -> None:
    engine.answers[1, method] = lambda: raised(error)
    assert engine.calls.add(A)
    assert engine.methods(0) == BOTH
    assert engine.adapters.ids() == [1], "its replacement gets the list"


def test_an_adapter_that_one_rank_does_not_read_in_time_is_added_to_no_rank(engine: Engine) -> None:
    late = Engine(timeout_s=0.05)
    late.answers[1, "begin_adapter"] = Future[Any]
    with pytest.raises(
        RpcTimeout, match=r"add_lora\('a'\): dp_ranks \[1\] haven't read /a within execute_timeout_s=0.05"
    ):
        late.calls.add(A)
    assert late.methods(1) == ["begin_adapter", "give_up_adapter"]
    assert late.calls.ids() == set()
    assert late.reported == []


def test_a_rank_that_does_not_follow_a_change_of_adapters_is_replaced(engine: Engine) -> None:
    late = Engine(timeout_s=0.05)
    late.answers[1, "sync_adapters"] = Future[Any]
    assert late.calls.add(A)
    assert late.reported == [1]


def test_an_adapter_with_the_name_or_the_number_of_another_adapter_is_refused(engine: Engine) -> None:
    engine.calls.add(A)
    engine.calls.add(B)
    for adapter in (LoRARequest("a", 2, "/a"), LoRARequest("a", 3, "/a"), LoRARequest("c", 1, "/a")):
        for load_inplace in (False, True):
            with pytest.raises(InvalidRequest, match="was added"):
                engine.calls.add(LoRARequest(*_fields(adapter), load_inplace=load_inplace))
    with pytest.raises(InvalidRequest, match="load_inplace=True to replace it"):
        engine.calls.add(LoRARequest("a", 1, "/elsewhere"))
    with pytest.raises(InvalidAdapter, match="not a path"):
        engine.calls.add(LoRARequest("c", 3, "elsewhere"))
    assert engine.adapters.ids() == [1, 2]


def _fields(adapter: LoRARequest) -> tuple[str, int, str]:
    return adapter.lora_name, adapter.lora_int_id, adapter.lora_path


def test_no_more_adapters_are_pinned_than_max_cpu_loras(engine: Engine) -> None:
    for number in (1, 2, 3):
        engine.calls.add(LoRARequest(str(number), number, "/a"))
    assert [engine.calls.pin(number) for number in (1, 2, 2, 1)] == [True] * 4
    with pytest.raises(InvalidInput, match="lora_id=3 can't be pinned, because all max_cpu_loras=2 slots"):
        engine.calls.pin(3)
    with pytest.raises(InvalidInput, match="lora_id=9 isn't an adapter that was added; these are: 1, 2, 3"):
        engine.calls.pin(9)
    engine.calls.remove(1)
    assert engine.calls.pin(3)


def test_a_sleeping_engine_refuses_to_add_and_pin_adapters(engine: Engine) -> None:
    engine.calls.add(A)
    engine.log.clear()
    engine.desired.change(activity=RUNNING.put_to_sleep(1))
    for call in (lambda: engine.calls.add(B), lambda: engine.calls.pin(1)):
        with pytest.raises(InvalidInput, match=r"the engine is asleep.*call wake_up\(\) first"):
            call()
    assert not engine.calls.add(A)
    assert engine.log == []
    assert engine.calls.remove(1)


@pytest.mark.parametrize("lora_id", ["1", 1.0, True, None])
def test_an_adapter_number_that_is_no_integer_is_refused(engine: Engine, lora_id: Any) -> None:
    for call in (engine.calls.remove, engine.calls.pin):
        with pytest.raises(InvalidInput, match="isn't an integer"):
            call(lora_id)


def test_an_ended_engine_refuses_calls_of_adapters(engine: Engine) -> None:
    engine.has_ended = True
    with pytest.raises(EngineDeadError):
        engine.calls.add(A)
