"""What `Scheduler` promises, one by one; `test_scheduler_random.py` mixes everything."""

import msgspec
import numpy as np
import pytest
from fake_engine_core import FakeEngineCore, FakeModelRunner, reference

from raycore.errors import InvalidRequest, RequestTooLarge
from raycore.messages import StepPlan, StepResult


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_single_request_runs_to_max_tokens(depth: int) -> None:
    engine = FakeEngineCore(depth=depth)
    seq_id = engine.submit([1, 2, 3], max_tokens=9)
    engine.run()
    assert len(engine.tokens[seq_id]) == 9
    assert engine.started == {seq_id: 0}


def test_steady_decode_sends_only_slots() -> None:
    engine = FakeEngineCore()
    engine.submit([1, 2], max_tokens=8)
    engine.submit([3, 4], max_tokens=8)
    for _ in range(2):
        engine.step()
    plan = engine.plans[-1]
    assert plan == StepPlan(1, plan.slots)
    assert sorted(ints(plan.slots)) == [0, 1]


def test_a_pure_decode_plan_for_256_requests_stays_under_4_kb() -> None:
    engine = FakeEngineCore(num_blocks=2048, block_size=4, max_num_seqs=256, max_num_batched_tokens=2048)
    for i in range(256):
        engine.submit([i % 50] * 3, max_tokens=20)
    sizes = []
    for _ in range(12):
        engine.step()
        sizes.append(len(msgspec.msgpack.encode(engine.plans[-1])))
    assert not engine.plans[3].new_block_ids
    assert sizes[3] < 1100
    assert engine.plans[-1].num_tokens == engine.plans[3].num_tokens == b""
    assert max(sizes[1:]) < 4096, "even when all 256 start on a block at once"


def test_prompts_are_chunked_while_decodes_continue() -> None:
    engine = FakeEngineCore(max_num_batched_tokens=8)
    engine.submit([1] * 4, max_tokens=10)
    engine.step()
    engine.submit([2] * 20, max_tokens=2)
    engine.run()
    assert [ints(plan.num_tokens) for plan in engine.plans[1:4]] == [[1, 7], [1, 7], [1, 6]]


def test_long_prompts_are_chunked_by_long_prefill_token_threshold() -> None:
    engine = FakeEngineCore(max_num_batched_tokens=16, long_prefill_token_threshold=5)
    engine.submit([1] * 12)
    engine.submit([2] * 3)
    engine.run()
    assert [ints(plan.num_tokens) for plan in engine.plans[:2]] == [[5, 3], [1, 5]]


def test_waiting_requests_start_in_order_as_slots_come_free() -> None:
    engine = FakeEngineCore(max_num_seqs=2)
    for _ in range(6):
        engine.submit([1, 2, 3], max_tokens=4)
    assert engine.scheduler.load().num_waiting == 6
    engine.step()
    load = engine.scheduler.load()
    assert (load.num_waiting, load.num_running) == (4, 2)
    assert load.kv_usage == 2 / 64
    engine.run()
    assert engine.start_order == list(range(6))


def test_requests_start_in_order_of_priority() -> None:
    engine = FakeEngineCore(max_num_seqs=1, policy="priority")
    for priority in (2, 1, 0, 1):
        engine.submit([1], priority=priority, max_tokens=2)
    engine.run()
    assert engine.start_order == [2, 1, 3, 0]


def test_the_latest_request_is_preempted_and_continues_where_it_was() -> None:
    engine = FakeEngineCore(num_blocks=10, enable_prefix_caching=False)
    for prompt in ([1] * 4, [2] * 4, [3] * 4):
        engine.submit(prompt, max_tokens=18, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    engine.run()
    resumed = [new for plan in engine.plans for new in plan.new_requests if len(new.token_ids) > 16]
    assert resumed
    assert {ints(new.token_ids)[0] for new in resumed} <= {2, 3}
    assert all(new.num_prompt_tokens == 4 for new in resumed)
    assert engine.started == {0: 0, 1: 0, 2: 0}, "only the first scheduling counts"
    assert engine.prompt_logprobs == {0: [1] * 3, 1: [2] * 3, 2: [3] * 3}
    assert engine.logprobs == engine.tokens


def test_the_request_of_lowest_priority_is_preempted() -> None:
    engine = FakeEngineCore(num_blocks=8, policy="priority", enable_prefix_caching=False)
    engine.submit([1] * 4, max_tokens=20, priority=5)
    engine.submit([2] * 4, max_tokens=20, priority=1)
    engine.run()
    resumed = [ints(new.token_ids)[0] for plan in engine.plans for new in plan.new_requests if len(new.token_ids) > 16]
    assert set(resumed) == {1}


def test_tokens_in_flight_for_a_preempted_request_are_drawn_again() -> None:
    engine = FakeEngineCore(num_blocks=8, depth=2, enable_prefix_caching=False)
    engine.submit([1] * 4, max_tokens=20)
    engine.submit([2] * 4, max_tokens=20)
    engine.run()
    assert engine.runner.num_resumed > 0


def test_a_cached_prefix_is_not_computed_again() -> None:
    engine = FakeEngineCore()
    prompt = list(range(13))
    engine.submit(prompt, max_tokens=4)
    engine.run()
    engine.submit(prompt, max_tokens=4)
    engine.submit(prompt[:12], max_tokens=4)
    engine.submit([*prompt[:6], 40, 41], max_tokens=4)
    engine.run()
    assert engine.started == {0: 0, 1: 12, 2: 8, 3: 4}, "full blocks, and at least one token is left"


def test_requests_of_one_step_share_their_prefix() -> None:
    engine = FakeEngineCore(max_num_batched_tokens=32)
    for _ in range(3):
        engine.submit(list(range(9)), max_tokens=3)
    engine.step()
    assert engine.started == {0: 0, 1: 8, 2: 8}
    assert engine.scheduler.load().kv_usage == (2 + 3) / 64
    engine.run()


def test_generated_tokens_are_in_the_prefix_cache() -> None:
    engine = FakeEngineCore()
    first = engine.submit([1, 2, 3], max_tokens=14)
    engine.run()
    engine.submit([1, 2, 3, *engine.tokens[first]], max_tokens=2)
    engine.run()
    assert engine.started[1] == 16


def test_prompt_logprobs_need_the_whole_prompt_computed() -> None:
    engine = FakeEngineCore(max_num_batched_tokens=6)
    for _ in range(2):
        engine.submit(list(range(14)), max_tokens=2, prompt_logprobs=1)
    engine.run()
    assert engine.started == {0: 0, 1: 0}
    assert engine.prompt_logprobs == {0: list(range(1, 14)), 1: list(range(1, 14))}


def test_requests_share_no_prefix_with_prefix_caching_off() -> None:
    engine = FakeEngineCore(enable_prefix_caching=False)
    for _ in range(2):
        engine.submit(list(range(13)), max_tokens=2)
    engine.run()
    assert engine.started == {0: 0, 1: 0}
    assert engine.scheduler.reset_prefix_cache()


def test_a_reset_prefix_cache_is_not_hit_and_blocks_in_use_refuse_the_reset() -> None:
    engine = FakeEngineCore()
    engine.submit(list(range(13)), max_tokens=2)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache(), "blocks are in use"
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    engine.submit(list(range(13)), max_tokens=2)
    engine.run()
    assert engine.started[1] == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_resetting_running_requests_computes_them_again(depth: int) -> None:
    engine = FakeEngineCore(depth=depth, max_num_seqs=2)
    for _ in range(3):
        engine.submit(list(range(13)), max_tokens=6)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    load = engine.scheduler.load()
    assert (load.num_running, load.num_waiting, load.kv_usage, load.num_preemptions) == (0, 3, 0.0, 2)
    engine.run()


def test_start_over_computes_all_requests_again_on_workers_without_a_cache() -> None:
    engine = FakeEngineCore(max_num_seqs=2)
    for length in (2, 9, 6):
        engine.submit(list(range(13)), max_tokens=length)
    while not engine.finished:
        engine.step()
    engine.abort(2)
    engine.scheduler.start_over()
    engine.runner = FakeModelRunner(64, 4)
    engine.run()
    assert engine.plans[-1].freed_slots == []
    assert set(engine.finished) == {0, 1}


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_request_frees_its_blocks_at_once_and_has_no_further_output(depth: int) -> None:
    engine = FakeEngineCore(depth=depth, max_num_seqs=2)
    for _ in range(3):
        engine.submit([1, 2, 3, 4, 5], max_tokens=10)
    for _ in range(3):
        engine.step()
    engine.abort(0, 2, 99)
    engine.abort(0)
    load = engine.scheduler.load()
    assert (load.num_waiting, load.num_running) == (0, 1)
    engine.run()
    assert set(engine.finished) == {1}


def test_a_seq_id_can_be_used_again_after_an_abort() -> None:
    engine = FakeEngineCore(depth=2)
    engine.submit([1, 2, 3], max_tokens=10, seq_id=5)
    engine.step()
    engine.abort(5)
    engine.aborted.clear()
    engine.started.clear()
    engine.submit([4, 5, 6], max_tokens=10, seq_id=5)
    engine.run()


def test_aborting_all_requests_leaves_the_scheduler_without_work() -> None:
    engine = FakeEngineCore()
    engine.submit([1, 2], max_tokens=10)
    engine.step()
    engine.abort(0)
    assert not engine.scheduler.has_work()
    assert engine.scheduler.schedule() is None
    engine.submit([3, 4], max_tokens=3)
    engine.step()
    assert engine.plans[-1].freed_slots == [0], "the slot is freed with the next plan"
    engine.run()


def test_no_step_is_scheduled_while_the_last_token_is_in_flight() -> None:
    engine = FakeEngineCore(depth=2)
    engine.submit([1, 2], max_tokens=1)
    assert engine.scheduler.schedule() is not None
    assert engine.scheduler.schedule() is None
    assert engine.scheduler.has_work()


@pytest.mark.parametrize("options", [{}, {"stop_token_ids": list(range(0, 50, 3))}, {"ignore_eos": True}])
def test_stop_tokens_end_requests_unless_ignored(options: dict[str, object]) -> None:
    engine = FakeEngineCore(depth=2, max_num_batched_tokens=64)
    for seed in range(12):
        eos = list(range(seed % 4, 50, 7))
        engine.submit([seed], seed=seed, eos_token_ids=eos, max_tokens=30, min_tokens=seed % 3, **options)
    engine.run()
    expected = "length" if "ignore_eos" in options else "stop"
    assert expected in {reason for reason, _ in engine.finished.values()}


def test_a_request_continues_from_the_tokens_of_another_engine() -> None:
    engine = FakeEngineCore()
    first = engine.submit([1, 2, 3], max_tokens=10)
    engine.run()
    tokens = engine.tokens[first]
    second = engine.submit([1, 2, 3], max_tokens=10, output_token_ids=tokens[:6])
    engine.run()
    assert engine.tokens[second] == tokens[6:]


def test_refused_requests_do_not_disturb_the_running_ones() -> None:
    engine = FakeEngineCore(num_blocks=8)
    seq_id = engine.submit([1, 2, 3], max_tokens=6)
    with pytest.raises(RequestTooLarge):
        engine.submit([1] * 30, max_tokens=30)
    with pytest.raises(InvalidRequest, match="no tokens"):
        engine.submit([])
    with pytest.raises(InvalidRequest, match=f"seq_id {seq_id}"):
        engine.submit([1], seq_id=seq_id)
    assert engine.scheduler.load().num_waiting == 1
    engine.run()
    assert engine.tokens[0] == reference(engine.requests[0], 64)[0]


def test_a_request_that_needs_every_block_runs() -> None:
    engine = FakeEngineCore(num_blocks=8)
    engine.submit([1] * 4, max_tokens=8)
    engine.submit([2] * 20, max_tokens=13)
    engine.submit([3] * 4, max_tokens=8)
    engine.run()


def test_a_new_request_leaves_the_running_ones_room_to_grow() -> None:
    engine = FakeEngineCore(num_blocks=8, enable_prefix_caching=False)
    for token in range(3):
        engine.submit([token] * 8, max_tokens=8)
    engine.step()
    load = engine.scheduler.load()
    assert (load.num_waiting, load.num_running) == (1, 2)
    engine.run()
    assert engine.runner.num_resumed == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_that_a_worker_fails_ends_alone(depth: int) -> None:
    engine = FakeEngineCore(depth=depth, max_num_seqs=3)
    failing = engine.submit([1, 2, 3], max_tokens=20)
    others = [engine.submit([4 + i, 5], max_tokens=9 + i) for i in range(4)]
    execute = engine.runner.execute

    def fail_it(plan: StepPlan) -> StepResult:
        """From its fourth token on, with whatever token there is."""
        result, slots = execute(plan), ints(plan.slots)
        slot = next((s for s, new in engine.runner.rows.items() if new.num_prompt_tokens == 3), None)
        if slot in slots and len(engine.runner.known[slot]) > 6:
            result.failed = [(slots.index(slot), "it is too complex")]
        return result

    engine.runner.execute = fail_it
    while engine.step():
        pass
    assert engine.finished.pop(failing) == ("failed", "it is too complex")
    assert len(engine.tokens[failing]) == 4
    assert engine.finished == dict.fromkeys(others, ("length", None))
    assert engine.scheduler.load().kv_usage == 0


def test_flush_interval_is_the_smallest_of_those_with_new_tokens() -> None:
    engine = FakeEngineCore(max_num_batched_tokens=8)
    for interval in (0.5, 0.1, 0.3):
        engine.submit([1] * 6, max_tokens=3 if interval == 0.1 else 6, flush_interval_s=interval)
    engine.run()  # compares at each step


def test_a_block_is_not_shared_before_its_tokens_are_known() -> None:
    engine = FakeEngineCore(depth=3, block_size=1, max_num_seqs=1, num_blocks=128)
    leftovers = [0] * 12  # stay in the slot's row, where later tokens are not known yet
    engine.submit([1, 2, *leftovers], max_tokens=1)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    first = engine.submit([1, 2], max_tokens=8)
    engine.run()
    for known in range(8):
        engine.submit([1, 2, *engine.tokens[first][:known], *leftovers], max_tokens=1)
    engine.run()


def test_preemptions_and_prefix_cache_hits_are_counted() -> None:
    engine = FakeEngineCore(num_blocks=10, block_size=4, max_num_seqs=4)
    engine.submit([1] * 9, max_tokens=1)
    engine.run()
    load = engine.scheduler.load()
    assert (load.prefix_cache_queries, load.prefix_cache_hits, load.num_preemptions) == (9, 0, 0)
    engine.submit([1] * 9, max_tokens=1)
    engine.submit([1] * 9, max_tokens=1, prompt_logprobs=1)  # which doesn't look
    engine.run()
    load = engine.scheduler.load()
    assert (load.prefix_cache_queries, load.prefix_cache_hits, load.num_preemptions) == (18, 8, 0)
    for first in (2, 3):
        engine.submit([first] * 4, max_tokens=24)
    engine.run()
    load = engine.scheduler.load()
    assert load.num_preemptions == engine.runner.num_resumed > 0
    assert load.prefix_cache_queries == 18 + 8, "a request that starts over isn't counted again"


def test_requests_share_prefixes_only_with_those_of_their_salt() -> None:
    engine = FakeEngineCore(max_num_seqs=8, max_num_batched_tokens=128)
    prompt = list(range(12))
    salts = [None, "a", "b", None, "a", "b", "c"]
    for salt in salts:
        engine.submit(prompt, max_tokens=6, cache_salt=salt)
        engine.run()
    assert [engine.started[i] for i in range(len(salts))] == [0, 0, 0, 8, 8, 8, 0]
    engine.submit([*prompt, *engine.tokens[1]], max_tokens=1, cache_salt="a")
    engine.run()
    assert engine.started[len(salts)] == 16, "outputs are shared, too"


@pytest.mark.parametrize(("depth", "tells_tokens"), [(3, True), (4, False)])
def test_decodes_take_turns_in_the_steps_in_flight(depth: int, *, tells_tokens: bool) -> None:
    """As in a pipeline of three stages: each step has a third, and nobody waits longer than others."""
    engine = FakeEngineCore(depth=depth, num_turns=3, tells_tokens=tells_tokens, max_num_seqs=8, num_blocks=200)
    for seq_id in range(8):
        engine.submit([1, 2], max_tokens=30 if seq_id else 16)
    for _ in range(40):
        engine.step()
    last_start = max(index for index, plan in enumerate(engine.plans) if plan.new_requests)
    steady = [ints(plan.slots) for plan in engine.plans[last_start + 2 : last_start + 14]]
    assert {len(slots) for slots in steady} <= {2, 3}
    for start in range(len(steady) - 2):
        together = [slot for slots in steady[start : start + 3] for slot in slots]
        assert sorted(together) == list(range(8)), "each once in three steps"
    engine.run()


def test_stages_do_not_wait_for_tokens_while_there_are_prompts() -> None:
    """With three stages, a decode planned in one of the next two steps would hold up all of them."""
    engine = FakeEngineCore(depth=4, num_turns=3, max_num_seqs=24, max_num_batched_tokens=64, num_blocks=400)
    for _ in range(24):
        engine.submit([1, 2, 3, 4, 5, 6], max_tokens=8)
    engine.run()
    prompts = [plan for plan in engine.plans if plan.new_requests]
    assert len(prompts) > 6, "they are divided among steps"
    assert max(sum(ints(plan.num_tokens)) for plan in prompts) < 64
    last: dict[int, int] = {}
    for step, plan in enumerate(engine.plans[: len(prompts)]):
        for slot in ints(plan.slots):
            # consecutive chunks of a prompt may follow each other through the stages
            is_chunk = ints(plan.num_tokens)[ints(plan.slots).index(slot)] > 1
            assert is_chunk or step - last[slot] >= 3
            last[slot] = step


def test_a_lone_request_does_not_wait_for_its_turn() -> None:
    engine = FakeEngineCore(depth=4, num_turns=3)
    engine.submit([1], max_tokens=6)
    plans = [engine.scheduler.schedule() for _ in range(4)]
    assert [ints(plan.slots) for plan in plans if plan is not None] == [[0]] * 4


def test_a_single_step_in_flight_has_all_decodes() -> None:
    engine = FakeEngineCore(tells_tokens=True, max_num_seqs=8, num_blocks=200)
    for _ in range(8):
        engine.submit([1, 2], max_tokens=10)
    engine.run()
    assert [len(ints(plan.slots)) for plan in engine.plans] == [8] * 10
