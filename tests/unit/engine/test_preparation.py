"""A request starts when both its grammar and its adapter are ready."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from test_core import request

from raycore.config import LoRAConfig
from raycore.engine.preparation import Preparation
from raycore.errors import InvalidRequest
from raycore.lora.request import LoRARequest
from raycore.messages import EngineRequest
from raycore.structured_outputs import StructuredOutputsParams

ADAPTER = LoRARequest("adapter", 1, "/adapter")


class Workers:
    """Two things that a worker is slow at."""

    def __init__(self) -> None:
        self.compiling: set[int] = set()
        self.reading: set[int] = set()
        self.unreadable: dict[int, str] = {}

    def collective_rpc(self, method, args, non_block):
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


def preparing(workers: Workers) -> Preparation:
    return Preparation(LoRAConfig(enable_lora=True, max_loras=1), workers)


def test_only_requests_with_a_constraint_or_an_adapter_must_wait():
    preparation = preparing(Workers())
    assert not preparation.must_wait(asking(1))
    assert preparation.must_wait(asking(2, regex="a"))
    assert preparation.must_wait(asking(3, adapter=ADAPTER))
    with pytest.raises(InvalidRequest, match="lora_request='adapter' needs an engine with enable_lora=True"):
        Preparation(LoRAConfig(), Workers()).must_wait(asking(3, adapter=ADAPTER))


@pytest.mark.parametrize("first", ["grammar", "adapter"])
def test_a_request_waits_for_the_later_of_its_grammar_and_its_adapter(first: str):
    workers = Workers()
    preparation = preparing(workers)
    preparation.add(asking(1, regex="a", adapter=ADAPTER))
    preparation.add(asking(2, regex="b"))
    assert preparation.take_done().seq_ids == []
    in_turn = [workers.compiling, workers.reading]
    earlier, later = in_turn if first == "grammar" else in_turn[::-1]
    earlier.clear()
    assert preparation.take_done().seq_ids == ([2] if first == "grammar" else [])
    later.clear()
    done = preparation.take_done()
    assert done.seq_ids == ([1] if first == "grammar" else [1, 2])
    assert not preparation


def test_a_request_whose_adapter_cannot_be_read_never_starts():
    workers = Workers()
    preparation = preparing(workers)
    preparation.add(asking(1, regex="a", adapter=ADAPTER))
    preparation.take_done()
    (slot,) = workers.reading
    workers.unreadable[slot] = "no such file"
    workers.reading.clear()
    done = preparation.take_done()
    assert (done.seq_ids, done.failed) == ([], {1: "no such file"})


def test_a_dropped_request_waits_for_no_grammar_or_adapter():
    workers = Workers()
    preparation = preparing(workers)
    preparation.add(asking(1, regex="a", adapter=ADAPTER))
    assert preparation
    preparation.drop(1)
    preparation.drop(99)
    assert preparation.take_done().seq_ids == []
    assert not preparation


def test_adapter_editions_are_reported_only_for_requests_with_adapters():
    workers = Workers()
    preparation = preparing(workers)
    preparation.add(asking(1, adapter=ADAPTER))
    preparation.take_done()
    workers.reading.clear()
    preparation.take_done()
    assert [seq_id for seq_id, _ in preparation.note_begun([1, 2])] == [1]
    assert Preparation(LoRAConfig(), workers).note_begun([1]) == []
