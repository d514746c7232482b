"""What requests with a KV connector go through, case by case; `test_transfers_random.py` mixes everything."""

import numpy as np
import pytest
from fake_connector import Chances, FakeConnector, FakeGroupsConnector
from fake_engine_core import FakeEngineCore
from msgspec.msgpack import encode
from scheduler_parts import part_of

from raycore.kvcache.prefix_cache import extend_digests
from raycore.lora.request import LoRARequest
from raycore.messages import EngineRequest, ExternalHits, KVFetches, TokenReport
from raycore.parts.transfers.connectors.events import AllBlocksCleared, BlockRemoved, BlockStored
from raycore.parts.transfers.scheduler.transfers import Transfers
from raycore.parts.transfers.values import PARAMS
from raycore.sampling_params import SamplingParams

PROMPT = list(range(1, 15))
"""3 full blocks of 4, and 2 tokens."""


def warm_engine(**chances: float) -> FakeEngineCore:
    """An engine whose connector has the prompt's blocks, and whose cache has lost them."""
    engine = FakeEngineCore(connector=FakeConnector(4, Chances(**chances)))
    engine.submit(PROMPT, max_tokens=2)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    return engine


def test_what_the_first_step_loads_is_not_computed() -> None:
    engine = warm_engine(is_async=0.0)
    seq_id = engine.submit(PROMPT, max_tokens=2)
    engine.run()
    assert engine.started[seq_id] == 12
    assert engine.plans[-2].num_step_tokens == 2
    assert engine.connector.num_loaded == 12
    load = engine.scheduler.load()
    # each of the two requests has 14 tokens, and the cache was empty both times
    assert (load.prefix_cache_queries, load.prefix_cache_hits) == (28, 0)
    assert load.external == ExternalHits(num_queries=28, external_unspecified=12)


@pytest.mark.parametrize(
    ("said", "expected"),
    [({"disk": 8, "host": 4}, {"disk": 8, "host": 4}), ({"disk": 8}, None), ({"elsewhere": 12}, None)],
)
@pytest.mark.parametrize("is_async", [0.0, 1.0])
def test_tokens_are_counted_where_the_connector_says_they_were_if_it_says_of_all(said, expected, is_async) -> None:
    engine = warm_engine(is_async=is_async)
    engine.connector.get_external_cache_hit_sources = lambda request, num_tokens: said
    engine.submit(PROMPT, max_tokens=2)
    engine.run()
    expected = expected or {"external_unspecified": 12}
    assert engine.scheduler.load().external == ExternalHits(28, **expected)


@pytest.mark.parametrize(("num_offered", "expected"), [(16, 12), (14, 14), (12, 12)])
def test_a_block_with_the_last_token_is_computed_whole(num_offered: int, expected: int) -> None:
    engine = warm_engine()
    engine.connector.get_num_new_matched_tokens = lambda request, num_computed: (num_offered, True)
    told: list[int] = []
    engine.connector.update_state_after_alloc = lambda request, blocks, num_tokens: told.append(num_tokens)
    engine.submit([*PROMPT, 15, 16], max_tokens=2)
    engine.scheduler.schedule()
    assert told == [expected]


def test_a_request_waits_for_its_blocks_while_others_run() -> None:
    engine = warm_engine(is_async=1.0, is_done=0.0)
    waiting = engine.submit(PROMPT, max_tokens=2)
    other = engine.submit([30, 31], max_tokens=4)
    for _ in range(5):
        engine.step()
    load = engine.scheduler.load()
    assert (load.num_waiting, load.num_running, load.num_deferred) == (1, 0, 1)
    assert load.kv_fetches == KVFetches(in_progress=1)
    assert other in engine.finished
    assert waiting not in engine.started
    assert engine.scheduler.has_work()
    engine.connector.chances.is_done = 1.0
    engine.run()
    assert engine.started[waiting] == 12
    assert engine.scheduler.load().kv_fetches == KVFetches()


@pytest.mark.parametrize("is_async", [0.0, 1.0])
def test_blocks_that_did_not_arrive_are_computed(is_async: float) -> None:
    engine = warm_engine(is_async=is_async, fails=1.0)
    engine.submit(PROMPT, max_tokens=2)
    engine.run()
    assert engine.connector.num_failed == 3


@pytest.mark.parametrize("is_async", [0.0, 1.0])
def test_requests_fail_if_the_policy_says_so(is_async: float) -> None:
    engine = warm_engine(is_async=is_async, fails=1.0)
    part_of(engine.scheduler, Transfers).fails_requests = True
    outputs = []
    update = engine.scheduler.update
    engine.scheduler.update = lambda plan, result: outputs.append(update(plan, result)) or outputs[-1]
    seq_id = engine.submit(PROMPT, max_tokens=2)
    with pytest.raises(AssertionError):  # the engine of tests expects that requests finish
        engine.run()
    (end,) = [end for each in outputs for end in each.finished if end.seq_id == seq_id]
    assert end.finish_reason == "failed"
    assert "kv_load_failure_policy" in str(end.stop_reason)
    assert engine.connector.ended.count(seq_id) == 1
    engine.scheduler.check_integrity()
    assert engine.scheduler.load().kv_usage == 0.0


def test_a_connector_hears_of_the_end_of_each_request_that_it_has_heard_of() -> None:
    engine, heard = FakeEngineCore(connector=FakeConnector(4)), list[int]()
    engine.connector.on_new_request = lambda request: heard.append(request.seq_id)
    adapter = LoRARequest("adapter", 1, "/adapter")
    for seq_id, lora in ((7, None), (8, adapter)):
        engine.scheduler.submit(EngineRequest(seq_id, "", PROMPT, SamplingParams(), 0, lora=lora), is_held=True)
    engine.abort(7, 8)
    assert heard == engine.connector.ended == [7]
    engine.run()
    engine.scheduler.check_integrity()


def test_cached_blocks_of_all_groups_are_held_before_others_are_taken() -> None:
    windows, prompt = (None, 25), list(range(1, 31))
    engine = FakeEngineCore(windows=windows, connector=FakeGroupsConnector(4, Chances(is_async=1.0), windows=windows))
    engine.submit(prompt, max_tokens=2)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.submit(prompt[:10], max_tokens=2)
    engine.run()
    pool, calls = engine.scheduler._pool, list[tuple[str, object]]()
    share, take = pool.share, pool.take
    pool.share = lambda blocks: calls.append(("share", len(blocks))) or share(blocks)  # type: ignore[method-assign]
    pool.take = lambda count: calls.append(("take", count)) or take(count)  # type: ignore[method-assign]
    seq_id = engine.submit(prompt, max_tokens=2)
    engine.step()
    # of 7 blocks, the cache has 2, and the window sees all but the first
    assert calls[:4] == [("share", 2), ("share", 1), ("take", 5), ("take", 5)]
    engine.run()
    assert engine.started[seq_id] == 28


def test_an_aborted_request_keeps_blocks_that_are_still_written() -> None:
    engine = warm_engine(is_async=1.0, is_done=0.0)
    seq_id = engine.submit(PROMPT, max_tokens=2)
    engine.step()
    engine.abort(seq_id)
    engine.step()
    assert engine.scheduler.load().kv_usage > 0.0
    assert engine.connector.num_abandoned == 1
    engine.connector.chances.is_done = 1.0
    engine.run()


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(30, 1), (18, 12)])
def test_blocks_that_are_kept_for_others_are_given_up_for_requests_that_lack_some(
    num_prompt_tokens: int, max_tokens: int
) -> None:
    connector = FakeConnector(4, Chances(keeps_blocks=1.0, is_done=0.0))
    engine = FakeEngineCore(num_blocks=10, connector=connector)
    engine.submit(PROMPT, max_tokens=2)
    for _ in range(4):
        engine.step()
    connector.chances.keeps_blocks = 0.0
    short = engine.submit(list(range(20, 20 + num_prompt_tokens)), max_tokens=max_tokens)
    for _ in range(40):
        engine.step()
    assert short not in engine.finished
    connector.chances.gives_up = 1.0
    engine.run()
    assert connector.num_given_up == 1


def test_kept_blocks_are_given_up_before_a_running_request_is_preempted() -> None:
    connector = FakeConnector(4, Chances(keeps_blocks=1.0, is_done=0.0))
    engine = FakeEngineCore(num_blocks=10, connector=connector)
    engine.submit(PROMPT, max_tokens=2)
    for _ in range(4):
        engine.step()
    connector.chances.keeps_blocks, connector.chances.gives_up = 0.0, 1.0
    engine.submit(list(range(20, 38)), max_tokens=12)
    engine.run()
    assert connector.num_given_up == 1
    assert engine.scheduler.load().num_preemptions == 0


def test_clients_get_what_the_connector_says_at_the_end() -> None:
    engine = warm_engine()
    told = []
    update = engine.scheduler.update
    engine.scheduler.update = lambda plan, result: told.append(update(plan, result)) or told[-1]
    seq_id = engine.submit([1], max_tokens=1)
    engine.run()
    assert [each.reports for each in told] == [[(seq_id, TokenReport(PARAMS, 2, 0, encode({"ended": seq_id})))]]
    assert [each.hints for each in told] == [[]]


def test_events_say_what_the_prefix_cache_gets_and_loses() -> None:
    events = []
    engine = FakeEngineCore(kv_events=events, num_blocks=6)
    engine.submit(PROMPT, max_tokens=4)
    engine.run()
    tokens = [*PROMPT, *engine.tokens[0]][:16]
    digests: list[bytes] = []
    extend_digests(digests, np.array(tokens, np.int32), 4, 4)
    assert events == [
        BlockStored(digests[:3], None, PROMPT[:12], 4, None, "GPU", None),
        BlockStored(digests[3:], digests[2], tokens[12:], 4, None, "GPU", None),
    ]
    events.clear()
    engine.submit([40] * 12, max_tokens=1)
    engine.run()
    assert BlockRemoved([digests[3]], "GPU") in events
    events.clear()
    engine.scheduler.reset_prefix_cache()
    assert events == [AllBlocksCleared()]
