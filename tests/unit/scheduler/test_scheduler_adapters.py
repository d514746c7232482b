"""Running requests use a limited number of LoRA adapters, and none waits forever for its own."""

from __future__ import annotations

from fake_engine_core import FakeEngineCore

PROMPT = list(range(1, 13))


def test_a_plan_tells_workers_which_adapter_a_request_uses() -> None:
    engine = FakeEngineCore(max_adapters=2)
    engine.submit(PROMPT, max_tokens=2, adapter=(5, 1))
    engine.submit(PROMPT, max_tokens=2)
    engine.run()
    assert [new.adapter for plan in engine.plans for new in plan.new_requests] == [5, -1]


def test_prefixes_are_shared_only_with_the_same_version_of_an_adapter() -> None:
    engine = FakeEngineCore(max_adapters=2, max_num_seqs=1)
    for adapter in ((0, 1), None, (0, 1), (0, 2), (1, 3), None):
        engine.submit(PROMPT, max_tokens=2, adapter=adapter)
    engine.run()
    assert [num_cached > 0 for num_cached in engine.started.values()] == [False, False, True, False, False, True]


def test_requests_beyond_max_loras_adapters_wait_and_those_without_adapters_do_not() -> None:
    engine = FakeEngineCore(max_adapters=1, max_num_seqs=4, max_num_batched_tokens=64)
    first = engine.submit(PROMPT, max_tokens=6, adapter=(0, 1))
    second = engine.submit(PROMPT, max_tokens=6, adapter=(1, 2))
    third = engine.submit(PROMPT, max_tokens=6)
    engine.step()
    assert engine.start_order == [first, third]
    engine.run()
    assert engine.start_order == [first, third, second]
    assert all(len(tokens) == 6 for tokens in engine.tokens.values())


def test_a_request_that_waits_is_not_overtaken_by_later_ones_with_adapters() -> None:
    engine = FakeEngineCore(max_adapters=1, max_num_seqs=2, max_num_batched_tokens=64)
    engine.submit(PROMPT, max_tokens=4, adapter=(0, 1))
    waiting = engine.submit(PROMPT, max_tokens=4, adapter=(1, 2))
    for _ in range(3):
        engine.step()
        engine.submit(PROMPT, max_tokens=4, adapter=(0, 1))
    engine.run()
    assert engine.start_order[1] == waiting


def test_requests_that_wait_for_an_adapter_can_be_aborted_or_start_after_running_ones() -> None:
    engine = FakeEngineCore(max_adapters=1, max_num_seqs=4, max_num_batched_tokens=64)
    first = engine.submit(PROMPT, max_tokens=20, adapter=(0, 1))
    second = engine.submit(PROMPT, max_tokens=4, adapter=(1, 2))
    third = engine.submit(PROMPT, max_tokens=4, adapter=(2, 3))
    engine.step()
    assert engine.scheduler.load().num_waiting == 2
    engine.abort(second, first)
    engine.run()
    assert engine.start_order == [first, third]
    engine.scheduler.check_integrity()


def test_a_request_that_was_aborted_keeps_none_behind_it_from_an_adapter_in_use() -> None:
    engine = FakeEngineCore(max_adapters=1, max_num_seqs=4, max_num_batched_tokens=64)
    first = engine.submit(PROMPT, max_tokens=20, adapter=(0, 1))
    without_room = [engine.submit(PROMPT, max_tokens=4, adapter=(slot, slot)) for slot in (1, 2)]
    behind = engine.submit(PROMPT, max_tokens=4, adapter=(0, 1))
    engine.step()
    engine.abort(without_room[0])
    engine.step()
    assert engine.start_order == [first], "another one has no room"
    engine.abort(without_room[1])
    engine.step()
    assert engine.start_order == [first, behind]
    engine.scheduler.check_integrity()


def test_preempted_requests_continue_with_their_adapters() -> None:
    engine = FakeEngineCore(max_adapters=2, num_blocks=9, max_num_seqs=3)
    seq_ids = [engine.submit(PROMPT[: 6 + i], max_tokens=16, adapter=(i % 2, i % 2)) for i in range(3)]
    engine.run()
    assert engine.scheduler.load().num_preemptions > 0
    assert all(len(engine.tokens[seq_id]) == 16 for seq_id in seq_ids)
