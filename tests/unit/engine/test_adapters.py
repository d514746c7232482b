"""Requests wait until all workers hold their LoRA adapters, which have a limited number of places."""

from __future__ import annotations

from types import SimpleNamespace

from raycore.engine.adapters import AdaptersInUse
from raycore.lora.request import LoRARequest


def adapter(number: int) -> LoRARequest:
    return LoRARequest(f"adapter {number}", number, f"/adapters/{number}")


class ReadingWorkers:
    """Two workers. Each reads what it is asked to until `finish()`."""

    def __init__(self) -> None:
        self.reading: list[dict[int, LoRARequest]] = [{}, {}]
        self.failed: list[dict[int, str]] = [{}, {}]
        self.answers = True

    def collective_rpc(self, method, args, non_block):
        assert method == "prepare_adapters"
        assert non_block
        for each in self.reading:
            each.update(args[0])
        return SimpleNamespace(done=lambda: self.answers, result=self._answer)

    def _answer(self):
        failed, self.failed = self.failed, [{}, {}]
        return [(list(reading), each) for reading, each in zip(self.reading, failed, strict=True)]

    def finish(self, worker: int, number: int, error: str | None = None) -> None:
        (place,) = (place for place, each in self.reading[worker].items() if each == adapter(number))
        del self.reading[worker][place]
        if error is not None:
            self.failed[worker][place] = error

    def finish_all(self) -> None:
        self.reading = [{}, {}]


def make(num_places: int) -> tuple[AdaptersInUse, ReadingWorkers]:
    workers = ReadingWorkers()
    return AdaptersInUse(workers, num_places), workers  # type: ignore[arg-type]


def take_all(adapters: AdaptersInUse, workers: ReadingWorkers) -> dict[int, int]:
    """Let the workers finish. Returns the places of the requests that are ready then."""
    ready, failed = adapters.take_done()
    workers.finish_all()
    more, more_failed = adapters.take_done()
    assert not failed
    assert not more_failed
    ready |= more
    return {seq_id: held.place for seq_id, held in ready.items()}


def test_a_request_waits_until_all_workers_hold_its_adapter() -> None:
    adapters, workers = make(2)
    adapters.add(7, adapter(1))
    adapters.add(8, adapter(1))
    assert adapters.take_done() == ({}, {})
    workers.finish(0, 1)
    assert adapters.take_done() == ({}, {})
    workers.finish(1, 1)
    workers.answers = False
    assert adapters.take_done() == ({}, {})
    assert 7 in adapters
    workers.answers = True
    ready, failed = adapters.take_done()
    assert (set(ready), failed) == ({7, 8}, {})
    assert ready[7] == ready[8]
    assert not adapters


def test_an_adapter_that_is_held_makes_nobody_wait() -> None:
    adapters, workers = make(1)
    adapters.add(1, adapter(1))
    assert take_all(adapters, workers) == {1: 0}
    adapters.drop(1)
    adapters.add(2, adapter(1))
    ready, _ = adapters.take_done()
    assert set(ready) == {2}


def test_the_adapter_that_has_not_been_used_for_the_longest_time_makes_room() -> None:
    adapters, workers = make(2)
    places = {}
    for seq_id, number in ((1, 1), (2, 2), (3, 1)):
        adapters.add(seq_id, adapter(number))
        places |= take_all(adapters, workers)
    for seq_id in (1, 2, 3):
        adapters.drop(seq_id)
    adapters.add(4, adapter(3))
    assert take_all(adapters, workers) == {4: places[2]}


def test_a_request_waits_for_a_place_while_all_adapters_are_in_use() -> None:
    adapters, workers = make(1)
    adapters.add(1, adapter(1))
    assert take_all(adapters, workers) == {1: 0}
    adapters.add(2, adapter(2))
    assert take_all(adapters, workers) == {}
    adapters.drop(1)
    assert take_all(adapters, workers) == {2: 0}


def test_an_adapter_that_is_read_again_is_another_version() -> None:
    adapters, workers = make(1)
    versions = []
    for seq_id, number in enumerate((1, 2, 1)):
        adapters.add(seq_id, adapter(number))
        adapters.take_done()
        workers.finish_all()
        ready, _ = adapters.take_done()
        versions.append(ready[seq_id].version)
        adapters.drop(seq_id)
    assert len(set(versions)) == 3


def test_an_adapter_that_one_worker_cannot_read_fails_its_requests_only() -> None:
    adapters, workers = make(2)
    for seq_id, number in ((1, 1), (2, 2), (3, 1)):
        adapters.add(seq_id, adapter(number))
    adapters.take_done()
    workers.finish(0, 1)
    workers.finish(1, 1, "the file is damaged")
    ready, failed = adapters.take_done()
    assert (ready, failed) == ({}, {1: "the file is damaged", 3: "the file is damaged"})
    workers.finish_all()
    ready, failed = adapters.take_done()
    assert (set(ready), failed) == ({2}, {})
    adapters.add(4, adapter(1))
    assert set(take_all(adapters, workers)) == {4}, "the next request tries again"


def test_an_aborted_request_waits_no_more() -> None:
    adapters, workers = make(1)
    adapters.add(1, adapter(1))
    adapters.take_done()
    adapters.drop(1)
    assert 1 not in adapters
    adapters.drop(99)
    adapters.add(2, adapter(2))
    assert take_all(adapters, workers) == {}, "the first adapter is still being read"
    assert take_all(adapters, workers) == {2: 0}
