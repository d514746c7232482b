"""A request starts when both its grammar and its adapter are ready."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from configs import make_config
from fake_executor import FakeExecutor, request

from raycore.config import LoRAConfig
from raycore.engine.core import EngineCore
from raycore.errors import InvalidRequest
from raycore.lora.request import LoRARequest
from raycore.messages import EngineRequest, StepPlan
from raycore.scheduler.outputs import StepOutputs
from raycore.structured_outputs import StructuredOutputsParams

ADAPTER = LoRARequest("adapter", 1, "/adapter")


class Workers(FakeExecutor):
    """Two things that a worker is slow at."""

    def __init__(self) -> None:
        super().__init__()
        self.compiling: set[int] = set()
        self.reading: set[int] = set()
        self.unreadable: dict[int, str] = {}

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        if method not in ("prepare_grammars", "prepare_adapters"):
            return super().collective_rpc(method, timeout, args, kwargs)
        new, dropped = args
        under_way = self.compiling if method == "prepare_grammars" else self.reading
        under_way.difference_update(dropped)
        under_way.update(new)
        answer = lambda: sorted(under_way) if method == "prepare_grammars" else (sorted(under_way), self.unreadable)  # noqa: E731
        return SimpleNamespace(done=lambda: True, result=lambda: [answer()])


def asking(seq_id: int, *, regex: str | None = None, adapter: LoRARequest | None = None) -> EngineRequest:
    made = request(seq_id)
    made.lora = adapter
    if regex is not None:
        made.params = msgspec.structs.replace(made.params, structured_outputs=StructuredOutputsParams(regex=regex))
    return made


class Engine:
    """An engine whose scheduler only notes which requests may start."""

    def __init__(self, *, has_adapters: bool = True) -> None:
        self.workers = Workers()
        config = make_config()
        if has_adapters:
            config = msgspec.structs.replace(config, lora=LoRAConfig(enable_lora=True, max_loras=1))
        self.core = EngineCore(config, self.workers)
        self.may_start: list[int] = []
        self.core.scheduler.release = self.may_start.extend

    def take_prepared(self) -> tuple[list[int], dict[int, str]]:
        self.may_start.clear()
        failed = self.core.release_prepared()
        return list(self.may_start), failed

    @property
    def is_preparing(self) -> bool:
        return self.core.idle_wait_s() < 0.1

    def held(self) -> set[int]:
        return set(self.core.scheduler._held)


def test_only_requests_with_a_constraint_or_an_adapter_must_wait():
    engine = Engine()
    for asked in (asking(1), asking(2, regex="a"), asking(3, adapter=ADAPTER)):
        engine.core.submit(asked)
    assert engine.held() == {2, 3}
    without = Engine(has_adapters=False)
    with pytest.raises(InvalidRequest, match="lora_request='adapter' needs an engine with enable_lora=True"):
        without.core.submit(asking(3, adapter=ADAPTER))
    assert not without.core.scheduler._requests


@pytest.mark.parametrize("first", ["grammar", "adapter"])
def test_a_request_waits_for_the_later_of_its_grammar_and_its_adapter(first: str):
    engine = Engine()
    workers = engine.workers
    engine.core.submit(asking(1, regex="a", adapter=ADAPTER))
    engine.core.submit(asking(2, regex="b"))
    assert engine.take_prepared() == ([], {})
    in_turn = [workers.compiling, workers.reading]
    earlier, later = in_turn if first == "grammar" else in_turn[::-1]
    earlier.clear()
    assert engine.take_prepared() == ([2] if first == "grammar" else [], {})
    later.clear()
    assert engine.take_prepared() == ([1] if first == "grammar" else [1, 2], {})
    assert not engine.is_preparing


def test_a_request_whose_adapter_cannot_be_read_never_starts():
    engine = Engine()
    engine.core.submit(asking(1, regex="a", adapter=ADAPTER))
    engine.take_prepared()
    (slot,) = engine.workers.reading
    engine.workers.unreadable[slot] = "no such file"
    engine.workers.reading.clear()
    assert engine.take_prepared() == ([], {1: "no such file"})
    assert not engine.held()


def test_a_dropped_request_waits_for_no_grammar_or_adapter():
    engine = Engine()
    engine.core.submit(asking(1, regex="a", adapter=ADAPTER))
    assert engine.is_preparing
    engine.core.abort([1, 99])
    assert engine.take_prepared() == ([], {})
    assert not engine.is_preparing


def test_adapter_editions_are_reported_only_for_requests_with_adapters():
    engine = Engine()
    engine.core.submit(asking(1, adapter=ADAPTER))
    engine.take_prepared()
    engine.workers.reading.clear()
    engine.take_prepared()
    for has_adapters, expected in ((True, [1]), (False, [])):
        outputs = StepOutputs(started=[(1, 0), (2, 0)])
        for part in (engine if has_adapters else Engine(has_adapters=False)).core.parts:
            part.step_done(StepPlan(0, b"", b"", [], []), outputs)
        assert [seq_id for seq_id, _ in outputs.adapter_revisions] == expected
