"""Requests wait until all workers hold their LoRA adapters, which have a limited number of slots."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from raycore.errors import InvalidAdapter, InvalidInput, InvalidRequest
from raycore.lora.request import LoRARequest
from raycore.messages import AdapterUse
from raycore.parts.adapters.engine.adapters import AdaptersInUse
from raycore.parts.adapters.values import NONE_ADDED, AddedAdapter, AddedAdapters


def adapter(number: int) -> LoRARequest:
    return LoRARequest(f"adapter {number}", number, f"/adapters/{number}")


class ReadingWorkers:
    """Two workers. Each reads what it is asked to until `finish()`."""

    def __init__(self) -> None:
        self.reading: list[dict[int, LoRARequest]] = [{}, {}]
        self.failed: list[dict[int, str]] = [{}, {}]
        self.held: dict[int, LoRARequest | None] = {}
        """By slot; None until a worker has read it."""
        self.answers = True
        self.reads_at_once = False
        self.unreadable: set[int] = set()
        """The numbers of adapters that the second worker can't read then."""

    def collective_rpc(self, method, args, non_block=False):
        if method == "drop_adapters":
            self._drop(args[0])
            return None
        assert method == "prepare_adapters"
        assert non_block
        new, dropped = args
        self._drop(dropped)
        for each in self.reading:
            each.update(new)
        self.held.update(dict.fromkeys(new))
        return SimpleNamespace(done=lambda: self.answers, result=self._answer)

    def _drop(self, slots: list[int]) -> None:
        for slot in slots:
            self.held.pop(slot, None)
            for each in self.reading:
                each.pop(slot, None)

    def _answer(self):
        if self.reads_at_once:
            self.failed[1] = {
                slot: "no such directory"
                for slot, each in self.reading[1].items()
                if each.lora_int_id in self.unreadable
            }
            self.finish_all()
        failed, self.failed = self.failed, [{}, {}]
        return [(list(reading), each) for reading, each in zip(self.reading, failed, strict=True)]

    def finish(self, worker: int, number: int, error: str | None = None) -> None:
        (slot,) = (slot for slot, each in self.reading[worker].items() if each.lora_int_id == number)
        self._finish(worker, slot)
        if error is not None:
            self.failed[worker][slot] = error

    def _finish(self, worker: int, slot: int) -> None:
        self.held[slot] = self.reading[worker].pop(slot)

    def finish_all(self) -> None:
        for worker, reading in enumerate(self.reading):
            for slot in list(reading):
                self._finish(worker, slot)


def make(num_adapters: int) -> tuple[AdaptersInUse, ReadingWorkers]:
    workers = ReadingWorkers()
    return AdaptersInUse(workers, num_adapters), workers  # type: ignore[arg-type]


def take_all(adapters: AdaptersInUse, workers: ReadingWorkers) -> dict[int, int]:
    """Let the workers finish. Returns the slots of the requests that are ready then."""
    ready, failed = adapters.take_done()
    workers.finish_all()
    more, more_failed = adapters.take_done()
    assert not failed
    assert not more_failed
    ready |= more
    return {seq_id: held.slot for seq_id, held in ready.items()}


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


def test_a_request_whose_adapter_is_held_does_not_wait() -> None:
    adapters, workers = make(1)
    adapters.add(1, adapter(1))
    assert take_all(adapters, workers) == {1: 0}
    adapters.drop(1)
    adapters.add(2, adapter(1))
    ready, _ = adapters.take_done()
    assert set(ready) == {2}


def test_adapter_use_lists_the_names_of_waiting_and_running_requests() -> None:
    adapters, workers = make(2)
    for seq_id, number in ((1, 2), (2, 1), (3, 1), (4, 3)):
        adapters.add(seq_id, adapter(number))
    assert adapters.use() == AdapterUse((), ("adapter 1", "adapter 2", "adapter 3"))
    take_all(adapters, workers)
    adapters.note_begun([1, 2, 100])  # 100 uses no adapter
    assert adapters.use() == AdapterUse(("adapter 1", "adapter 2"), ("adapter 1", "adapter 3"))
    adapters.drop(2)
    assert adapters.use() == AdapterUse(("adapter 2",), ("adapter 1", "adapter 3"))
    for seq_id in (1, 3, 4):
        adapters.drop(seq_id)
    assert adapters.use() == AdapterUse()


def test_a_request_that_has_begun_and_fails_uses_no_adapter() -> None:
    adapters, workers = make(1)
    adapters.add(1, adapter(1))
    take_all(adapters, workers)
    adapters.note_begun([1])
    adapters.sleep(drops=True)
    workers.reads_at_once, workers.unreadable = True, {1}
    adapters.wake(1.0)
    assert adapters.take_done()[1].keys() == {1}
    adapters.drop(1)
    adapters.add(2, adapter(2))
    assert adapters.use() == AdapterUse((), ("adapter 2",))


def test_the_least_recently_used_adapter_is_evicted() -> None:
    adapters, workers = make(2)
    slots = {}
    for seq_id, number in ((1, 1), (2, 2), (3, 1)):
        adapters.add(seq_id, adapter(number))
        slots |= take_all(adapters, workers)
    for seq_id in (1, 2, 3):
        adapters.drop(seq_id)
    adapters.add(4, adapter(3))
    assert take_all(adapters, workers) == {4: slots[2]}


def test_a_request_waits_for_a_place_while_all_adapters_are_in_use() -> None:
    adapters, workers = make(1)
    adapters.add(1, adapter(1))
    assert take_all(adapters, workers) == {1: 0}
    adapters.add(2, adapter(2))
    assert take_all(adapters, workers) == {}
    adapters.drop(1)
    assert take_all(adapters, workers) == {2: 0}


def test_an_adapter_that_is_read_again_gets_another_load_id() -> None:
    adapters, workers = make(1)
    load_ids = []
    for seq_id, number in enumerate((1, 2, 1)):
        adapters.add(seq_id, adapter(number))
        adapters.take_done()
        workers.finish_all()
        ready, _ = adapters.take_done()
        load_ids.append(ready[seq_id].load_id)
        adapters.drop(seq_id)
    assert len(set(load_ids)) == 3


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


def test_an_aborted_request_stops_waiting_for_its_adapter() -> None:
    adapters, workers = make(1)
    adapters.add(1, adapter(1))
    adapters.take_done()
    adapters.drop(1)
    assert 1 not in adapters
    adapters.drop(99)
    adapters.add(2, adapter(2))
    assert take_all(adapters, workers) == {}, "the first adapter is still being read"
    assert take_all(adapters, workers) == {2: 0}


# ---- what the driver adds


def added(number: int, revision: int | None = None, **options: bool) -> AddedAdapter:
    return AddedAdapter(adapter(number), number if revision is None else revision, **options)


def listed(*each: AddedAdapter) -> AddedAdapters:
    found = NONE_ADDED
    for one in each:
        found = found.with_adapter(one)
    return found


def is_done(future: Future[Any], adapters: AdaptersInUse, workers: ReadingWorkers) -> bool:
    """Whether a future is done when the workers have finished."""
    assert not adapters.take_done()[1]
    workers.finish_all()
    adapters.take_done()
    return future.done()


def add(adapters: AdaptersInUse, workers: ReadingWorkers, *each: AddedAdapter, before: AddedAdapters = NONE_ADDED):
    """Add adapters one by one, as the driver does. Returns the list."""
    for one in each:
        assert is_done(adapters.begin(one), adapters, workers)
        before = before.with_adapter(one)
        assert adapters.sync(before, [one.adapter.lora_int_id]).result(0) == {}
    return before


def use(adapters: AdaptersInUse, workers: ReadingWorkers, seq_id: int, number: int, revision: int | None = None):
    """Let a request use an adapter. Returns what it gets."""
    adapters.add(seq_id, adapter(number), revision)
    found = adapters.take_done()[0]
    workers.finish_all()
    return (found | adapters.take_done()[0])[seq_id]


def test_an_added_adapter_is_held_before_a_request_uses_it() -> None:
    adapters, workers = make(2)
    done = adapters.begin(added(1))
    assert adapters
    adapters.take_done()
    workers.finish(0, 1)
    adapters.take_done()
    assert not done.done()
    workers.finish(1, 1)
    adapters.take_done()
    assert done.done()
    adapters.sync(listed(added(1)), [1])
    adapters.add(7, adapter(1))
    assert set(adapters.take_done()[0]) == {7}


def test_an_adapter_that_one_worker_cannot_read_is_kept_by_no_worker() -> None:
    adapters, workers = make(1)
    first = use(adapters, workers, 1, 2)
    adapters.drop(1)
    done = adapters.begin(added(1))
    adapters.take_done()
    workers.finish(0, 1)
    workers.finish(1, 1, "the file is damaged")
    assert adapters.take_done() == ({}, {})
    with pytest.raises(InvalidAdapter, match="the file is damaged"):
        done.result(0)
    adapters.take_done()
    assert not adapters
    assert workers.held == {}
    assert use(adapters, workers, 2, 2).slot == first.slot


def test_an_adapter_that_another_rank_cannot_read_is_dropped() -> None:
    adapters, workers = make(1)
    assert is_done(adapters.begin(added(1)), adapters, workers)
    adapters.give_up(1)
    adapters.take_done()
    assert workers.held == {}
    # one that is still being read, too
    adapters.begin(added(2, 3))
    adapters.take_done()
    adapters.give_up(3)
    adapters.take_done()
    assert workers.held == {}
    assert workers.reading == [{}, {}]
    assert not adapters


def test_a_pinned_adapter_is_not_evicted() -> None:
    adapters, workers = make(2)
    before = add(adapters, workers, added(1, is_pinned=True), added(2))
    pinned = use(adapters, workers, 1, 1)
    adapters.drop(1)
    for seq_id, number in enumerate((3, 4, 2), start=2):
        assert use(adapters, workers, seq_id, number).slot != pinned.slot
        adapters.drop(seq_id)
    add(adapters, workers, added(2, is_pinned=True), before=before)
    with pytest.raises(InvalidInput, match="all max_cpu_loras=2 slots for adapters are taken: 2 are pinned"):
        adapters.begin(added(5)).result(0)
    adapters.add(9, adapter(5))
    ready, failed = adapters.take_done()
    assert (set(ready), set(failed)) == (set(), {9}), "it would wait forever"


def test_an_added_adapter_evicts_no_adapter_in_use() -> None:
    adapters, workers = make(1)
    use(adapters, workers, 1, 1)
    with pytest.raises(InvalidInput, match="slots for adapters are taken: 0 are pinned, and the others are used by"):
        adapters.begin(added(2)).result(0)
    adapters.drop(1)
    assert is_done(adapters.begin(added(2)), adapters, workers)


def test_a_removed_adapter_stays_until_its_requests_have_ended() -> None:
    adapters, workers = make(1)
    before = add(adapters, workers, added(1, is_pinned=True))
    old = use(adapters, workers, 1, 1)
    adapters.sync(before.without(1), [])
    adapters.take_done()
    assert workers.held == {old.slot: adapter(1)}
    adapters.drop(1)
    adapters.take_done()
    assert workers.held == {}
    new = use(adapters, workers, 2, 1)
    assert new.load_id != old.load_id, "it is read again"


def test_requests_end_with_the_revision_of_the_adapter_that_they_began_with() -> None:
    adapters, workers = make(1)
    before = add(adapters, workers, added(1, 1))
    old = use(adapters, workers, 1, 1)
    reading = adapters.begin(added(1, 2, is_replacement=True))
    assert use(adapters, workers, 2, 1) == old, "it isn't replaced yet"
    assert is_done(reading, adapters, workers)
    adapters.sync(before.with_adapter(added(1, 2, is_replacement=True)), [1])
    new = use(adapters, workers, 3, 1)
    assert (new.slot, new.load_id) != (old.slot, old.load_id)
    assert [adapters.revision(seq_id) for seq_id in (1, 2, 3, 4)] == [1, 1, 2, None]
    assert len(workers.held) == 2
    with pytest.raises(InvalidInput, match="max_cpu_loras=1"):
        adapters.begin(added(1, 3, is_replacement=True)).result(0)
    adapters.drop(1)
    adapters.take_done()
    assert len(workers.held) == 2, "request 2 still uses it"
    adapters.drop(2)
    adapters.take_done()
    assert set(workers.held) == {new.slot}
    assert is_done(adapters.begin(added(1, 4, is_replacement=True)), adapters, workers)


def test_a_request_that_waits_while_its_adapter_is_replaced_gets_the_new_revision() -> None:
    adapters, workers = make(1)
    before = add(adapters, workers, added(1, 1))
    use(adapters, workers, 1, 2)
    adapters.add(2, adapter(1))
    assert adapters.take_done() == ({}, {}), "there is no slot for it"
    adapters.sync(before.with_adapter(added(1, 2, is_replacement=True)), [])
    adapters.drop(1)
    assert set(take_all(adapters, workers)) == {2}
    assert adapters.revision(2) == 2


@pytest.mark.parametrize("is_replacement", [True, False])
def test_a_request_moved_from_another_rank_continues_with_the_same_files_or_fails(is_replacement: bool) -> None:
    adapters, workers = make(2)
    add(adapters, workers, added(1, 5, is_replacement=is_replacement))
    use(adapters, workers, 1, 1, revision=5)
    assert adapters.revision(1) == 5
    adapters.add(2, adapter(1), revision=3)
    ready, failed = adapters.take_done()
    assert not ready
    assert ("was replaced after the request had begun" in failed.get(2, "")) == is_replacement
    assert (2 in adapters) != is_replacement, "its directory is as it was, and is read"


def test_a_request_with_the_number_of_another_added_adapter_is_refused() -> None:
    adapters, workers = make(2)
    add(adapters, workers, added(1))
    with pytest.raises(InvalidRequest, match="lora_int_id=1 is the number of 'adapter 1', which was added"):
        adapters.check(LoRARequest("another", 1, "/other"))
    adapters.check(LoRARequest("another", 2, "/other"))
    moved = LoRARequest("adapter 1", 1, "/moved")
    adapters.check(moved)
    adapters.add(1, moved)
    assert set(adapters.take_done()[0]) == {1}, "it uses what was added"


def test_a_rank_that_joins_reads_as_many_added_adapters_as_it_can_hold() -> None:
    adapters, workers = make(2)
    everything = listed(added(1, is_pinned=True), added(2), added(3), added(4))
    wanted = everything.first_ids(2)
    assert wanted == [1, 4]
    done = adapters.sync(everything, wanted)
    adapters.take_done()
    workers.finish(0, 1)
    workers.finish(1, 1)
    workers.finish(0, 4)
    workers.finish(1, 4, "no such directory")
    assert not done.done()
    adapters.take_done()
    assert done.result(0) == {4: "no such directory"}
    assert set(use(adapters, workers, 1, 1)) == {*use(adapters, workers, 2, 1)}
    adapters.sync(NONE_ADDED, [])
    assert adapters.revision(1) == 1, "an older list changes nothing"


def test_workers_that_wake_up_read_the_dropped_adapters_again() -> None:
    adapters, workers = make(2)
    before = add(adapters, workers, added(1, 1), added(2, 2))
    old = use(adapters, workers, 1, 1)
    add(adapters, workers, added(1, 3, is_replacement=True), before=before)
    new, other = use(adapters, workers, 2, 1), use(adapters, workers, 3, 2)
    adapters.sleep(drops=True)
    assert set(workers.held) == {old.slot}, "its files are gone, and a request will go on with it"
    adapters.add(4, adapter(1))
    assert adapters.take_done() == ({}, {})
    workers.reads_at_once = True
    adapters.wake(5.0)
    assert set(workers.held) == {old.slot, new.slot, other.slot}
    assert set(adapters.take_done()[0]) == {4}


def test_a_request_fails_if_its_adapter_is_gone_when_workers_wake_up() -> None:
    adapters, workers = make(2)
    add(adapters, workers, added(1), added(2))
    use(adapters, workers, 1, 1)
    use(adapters, workers, 2, 2)
    adapters.sleep(drops=True)
    workers.reads_at_once, workers.unreadable = True, {1}
    adapters.wake(5.0)
    assert adapters.take_done() == ({}, {1: "no such directory"})
    adapters.drop(1)
    assert set(workers.held.values()) >= {adapter(2)}
    assert use(adapters, workers, 3, 2).slot == use(adapters, workers, 4, 2).slot


@pytest.mark.parametrize("drops", [True, False])
def test_an_adapter_being_read_when_workers_fall_asleep_is_not_added(drops: bool) -> None:
    adapters, workers = make(2)
    reading = adapters.begin(added(1))
    joining = adapters.sync(listed(added(2)), [2])
    adapters.take_done()
    adapters.sleep(drops=drops)
    with pytest.raises(InvalidInput, match=r"fell asleep meanwhile: call wake_up\(\) first"):
        reading.result(0)
    assert joining.result(0) == {}, "it is read before the first step"
    adapters.give_up(1)
    workers.reads_at_once = True
    adapters.wake(5.0)
    assert list(workers.held.values()) == [adapter(2)]


def test_a_light_sleep_keeps_adapters() -> None:
    adapters, workers = make(2)
    add(adapters, workers, added(1))
    adapters.sleep(drops=False)
    assert len(workers.held) == 1
    adapters.wake(5.0)
    assert len(workers.held) == 1
