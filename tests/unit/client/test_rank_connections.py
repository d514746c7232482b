"""How a client receives a rank's outputs."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.exceptions import GetTimeoutError, ObjectRefStreamEndOfStreamError
from waiting import LONG_S

from raycore import ray_api
from raycore.client.rank_connections import RankConnections
from raycore.client.receiver import Receiver
from raycore.messages import EngineInfo, OutputBatch

INFO = EngineInfo(0, 0, "", 100, 16, 100, "float32", {}, [])


class _Call:
    """A call of a method that yields, in the caller's process."""

    def __init__(self, items: list[bytes]) -> None:
        self._items = items
        self._generator_ref = self

    def peek(self) -> tuple[Any, bool]:
        return SimpleNamespace(future=self._end), bool(self._items)

    @staticmethod
    def _end() -> Future[bytes]:
        end: Future[bytes] = Future()
        end.set_exception(ObjectRefStreamEndOfStreamError())
        return end

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        if not self._items:
            raise StopIteration
        return self._items.pop(0)


def test_a_ranks_output_stream_continues_in_a_new_call_at_the_limit_of_one_call(monkeypatch):
    """Ray keeps something for each item until the call ends."""
    batch = msgspec.msgpack.encode(OutputBatch())
    calls = [_Call([batch] * count) for count in (3, 3, 2, 1)]
    outputs = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda client, connection: calls.pop(0)))
    core = SimpleNamespace(peek_object_ref_stream=lambda call: call.peek())
    monkeypatch.setattr(ray_api, "MAX_STREAMED", 3)
    monkeypatch.setattr(ray_api, "get", lambda ref, timeout_s: ref)
    monkeypatch.setattr(ray_api._ray._private.worker.global_worker, "core_worker", core, raising=False)
    delivered: list[OutputBatch] = []
    connections = RankConnections(0, lambda connection, outputs: delivered.append(outputs))
    connections.connect(0, SimpleNamespace(outputs=outputs), INFO)  # type: ignore[arg-type]
    assert connections.join(LONG_S)
    assert len(delivered) == 8
    assert len(calls) == 1, "a call that yields fewer is the last"


class _Late(_Call):
    """A call whose one item is known before its value is here."""

    def __init__(self) -> None:
        super().__init__([b"ref"])
        self.value: Future[bytes] = Future()
        self.ref = SimpleNamespace(future=lambda: self.value)

    def __next__(self) -> object:
        super().__next__()
        return self.ref


def test_an_item_whose_value_comes_later_is_told_of_and_taken_once(monkeypatch):
    """The receiver must not wait for one rank: others would wait, too."""
    call = _Late()
    method = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: call))
    core = SimpleNamespace(peek_object_ref_stream=lambda call: call.peek())
    monkeypatch.setattr(ray_api._ray._private.worker.global_worker, "core_worker", core, raising=False)

    def get(ref: object, timeout_s: float | None = None) -> bytes:
        assert timeout_s == 0
        raise GetTimeoutError

    monkeypatch.setattr(ray_api, "get", get)
    stream, told = ray_api.Stream(method), list[Future[bytes]]()  # type: ignore[arg-type]
    assert stream.next_or_tell(told.append) is None
    assert told == []
    call.value.set_result(b"large")
    assert [stream.take(each) for each in told] == [b"large"]
    assert stream.next_or_tell(told.append) is None
    with pytest.raises(StopIteration):
        stream.take(told[-1])


def test_requests_are_checked_by_the_smallest_cache_of_the_ranks_that_are_connected(monkeypatch):
    monkeypatch.setattr(Receiver, "add", lambda *args: None)
    connections = RankConnections(0, lambda connection, outputs: None)
    actor: Any = SimpleNamespace()
    large, small, smaller = (msgspec.structs.replace(INFO, num_blocks=count) for count in (90, 20, 10))
    assert connections.connect(0, actor, large) is large
    assert connections.connect(1, actor, smaller) is smaller
    assert connections.connect(2, actor, small) is smaller
    connections.disconnect([1])
    assert connections.connect(3, actor, large) is small
    connections.disconnect([0, 2, 3])
    assert connections.connect(1, actor, large) is large
    assert connections.connect(1, actor, small) is small, "it was replaced"


def test_whether_the_outputs_of_many_ranks_have_come_is_asked_of_each_rank_about_once(monkeypatch):
    monkeypatch.setattr(Receiver, "add", lambda *args: None)
    connections = RankConnections(0, lambda connection, outputs: None)
    actor: Any = SimpleNamespace()
    for dp_rank in range(1000):
        connections.connect(dp_rank, actor, msgspec.structs.replace(INFO, pid=dp_rank))
    connections.disconnect([7])
    asked = 0

    class Counted(dict[int, Any]):
        def get(self, *args: Any) -> Any:
            nonlocal asked
            asked += 1
            return super().get(*args)

    connections._by_rank = Counted(connections._by_rank)  # pyright: ignore[reportPrivateUsage]
    left = {dp_rank: (dp_rank + (dp_rank == 8), 1) for dp_rank in range(1000)}
    answers: list[bool] = []
    for connection in connections.all():
        if connection.dp_rank != 8:  # another rank has its place
            answers.append(connections.has_received(left))
            connection.num_batches += 1
    assert not any(answers)
    assert connections.has_received(left)
    assert asked < 2100
