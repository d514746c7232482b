"""Adapters are read in the background, each for a slot of its own."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft_adapters import save_adapter
from small_model import SPEC
from waiting import LONG_S, eventually

from raycore.lora.request import LoRARequest
from raycore.parts.adapters.layers import Adapters
from raycore.parts.adapters.worker import AdapterReader
from raycore.weights.share import WeightShare


class HeldReader(AdapterReader):
    """Reads nothing before `may_read` is set."""

    def __init__(self, adapters: Adapters) -> None:
        config = SimpleNamespace(lora=SimpleNamespace(max_lora_rank=16))
        setup = SimpleNamespace(share=WeightShare(SPEC, torch.float32))
        super().__init__(SimpleNamespace(config=config, setup=setup, model=SimpleNamespace(adapters=adapters)))
        self.may_read = threading.Event()
        self.num_read = 0

    def read(self, adapter: LoRARequest):
        assert self.may_read.wait(LONG_S)
        self.num_read += 1
        return super().read(adapter)


@pytest.fixture
def adapters() -> Adapters:
    return Adapters(torch.device("cpu"), 3)


@pytest.fixture
def reader(adapters: Adapters) -> HeldReader:
    return HeldReader(adapters)


@pytest.fixture
def request_of_one(tmp_path: Path) -> LoRARequest:
    save_adapter(tmp_path / "one", SPEC)
    return LoRARequest("one", 1, str(tmp_path / "one"))


def finish(reader: AdapterReader) -> dict[int, str]:
    """Wait until nothing is being read. Returns what has failed."""
    failed = dict[int, str]()

    def is_done() -> bool:
        reading, new = reader.prepare_adapters({}, [])
        failed.update(new)
        return not reading

    eventually(is_done)
    return failed


def test_an_adapter_is_held_once_it_has_been_read(
    reader: HeldReader, adapters: Adapters, request_of_one: LoRARequest
) -> None:
    assert reader.prepare_adapters({0: request_of_one, 2: request_of_one}, []) == ([0, 2], {})
    assert not adapters._adapters
    reader.may_read.set()
    assert finish(reader) == {}
    assert adapters._adapters.keys() == {0, 2}
    assert reader.prepare_adapters({}, [2]) == ([], {})
    assert adapters._adapters.keys() == {0}


def test_an_adapter_dropped_before_it_was_read_is_never_held(
    reader: HeldReader, adapters: Adapters, request_of_one: LoRARequest
) -> None:
    reader.prepare_adapters({0: request_of_one, 1: request_of_one}, [])
    reader.drop_adapters([0, 1])
    assert reader.prepare_adapters({2: request_of_one}, []) == ([2], {})
    reader.may_read.set()
    assert finish(reader) == {}
    assert adapters._adapters.keys() == {2}
    assert reader.num_read <= 2, "what no thread had begun is not read"


def test_an_adapter_that_cannot_be_read_is_reported_and_others_are_held(
    reader: HeldReader, adapters: Adapters, request_of_one: LoRARequest, tmp_path: Path
) -> None:
    reader.may_read.set()
    _, failed = reader.prepare_adapters({0: LoRARequest("none", 2, str(tmp_path / "none")), 1: request_of_one}, [])
    failed |= finish(reader)
    assert failed.keys() == {0}
    assert str(tmp_path / "none") in failed[0]
    assert adapters._adapters.keys() == {1}
