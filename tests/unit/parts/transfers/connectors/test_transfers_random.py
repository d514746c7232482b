"""A connector whose transfers are late, fail or are in the way: no token differs, no block is lost or freed early.

`FakeModelRunner` checks every context that it reads, `FakeConnector` what it saves and sends.
"""

from collections import Counter
from contextlib import suppress
from typing import Any

from fake_connector import Chances, FakeConnector, FakeGroupsConnector
from fake_engine_core import FakeEngineCore
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduler_parts import part_of

from raycore.errors import RequestTooLarge
from raycore.parts.transfers.scheduler.transfers import Transfers
from raycore.state.spec import FROM_ZERO

SOMETIMES = st.sampled_from([0.0, 0.0, 0.2, 0.7])


@st.composite
def engines(draw: st.DrawFn) -> FakeEngineCore:
    block_size = draw(st.sampled_from([1, 2, 4]))
    max_num_seqs = draw(st.integers(1, 6))
    num_right = draw(st.sampled_from([None, None, [2, 0, 5, 1]]))
    depth = 1 if num_right else draw(st.sampled_from([1, 2, 3]))
    chances = Chances(
        is_async=draw(st.sampled_from([0.0, 0.5, 1.0])),
        is_undecided=draw(st.sampled_from([0.0, 0.0, 0.5])),
        fails=draw(SOMETIMES),
        keeps_blocks=draw(SOMETIMES),
        is_done=draw(st.sampled_from([0.1, 0.5, 1.0])),
        gives_up=draw(SOMETIMES),
        loses_good=draw(st.sampled_from([0.0, 0.0, 0.0, 0.1])),
        partial=draw(st.booleans()),
    )
    windows = draw(st.sampled_from([(None,), (None,), (None, 3), (5,), (None, 2, 9)]))
    seed, num_states = draw(st.integers(0, 1000)), draw(st.sampled_from([None, None, 1, 2, 5]))
    num_parts = 0 if num_states is None else draw(st.integers(1, 2))
    connector = FakeGroupsConnector(block_size, chances, seed, windows=windows, num_state_parts=num_parts)
    if windows == (None,) and not num_parts:
        connector = FakeConnector(block_size, chances, seed)
    return FakeEngineCore(
        windows=windows,
        num_prefix_states=num_states,
        mamba_block_size=4,
        num_blocks=draw(st.integers(24, 80)) // block_size,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([0, 1, 5, 40])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        depth=depth,
        num_turns=draw(st.sampled_from([1, depth])),
        num_right=num_right,
        connector=connector,
    )


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=30)
REQUESTS = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([1, 2, 5, 15]),
        "seed": st.integers(0, 1),
        "priority": st.integers(0, 2),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
        "bad_words_token_ids": st.sampled_from([[], [], [[3, 4]]]),
    }
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), PROMPTS, REQUESTS),
        st.tuples(st.just("submit"), PROMPTS, REQUESTS),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("evict")),
        st.tuples(st.just("reset"), st.booleans()),
        st.tuples(st.just("start_over")),
        st.tuples(st.just("expire")),
    ),
    min_size=4,
    max_size=30,
)


@settings(max_examples=250)
@given(engine=engines(), operations=OPERATIONS)
def test_transfers_change_no_tokens_and_lose_no_blocks(
    engine: FakeEngineCore, operations: list[tuple[Any, ...]]
) -> None:
    connector = engine.connector
    assert connector is not None
    for operation, *arguments in operations:
        apply(engine, operation, arguments)
        engine.scheduler.check_integrity()
    engine.run()
    assert not connector.loads
    assert not connector.sends
    assert not list(part_of(engine.scheduler, Transfers).held_blocks())
    ended = Counter(connector.ended)
    assert set(ended.values()) <= {1}
    assert set(ended) == set(engine.requests)
    event(f"sends given up: {min(connector.num_given_up, 1)}")
    if connector.num_state_parts:
        event(f"loads with states: {min(connector.num_loaded, 1)}")
    event(f"loads: {min(connector.num_loaded, 1)}, failures: {min(connector.num_failed, 1)}")


def apply(engine: FakeEngineCore, operation: str, arguments: list[Any]) -> None:
    if operation == "submit":
        prompt, options = arguments
        with suppress(RequestTooLarge):
            engine.submit(prompt, **options)
    elif operation == "step":
        for _ in range(arguments[0]):
            engine.step()
    elif operation == "abort":
        if arguments[0] in engine.requests:
            engine.abort(arguments[0])
    elif operation == "evict":
        # what is elsewhere is only asked for if the cache has lost it
        engine.scheduler._pool.forget()
    elif operation == "reset":
        engine.scheduler.reset_prefix_cache(reset_running_requests=arguments[0])
    elif operation == "expire":
        transfers = part_of(engine.scheduler, Transfers)
        clock, transfers._clock = transfers._clock, lambda: float("inf")
        engine.step()
        transfers._clock = clock
    else:
        while engine.in_flight:
            engine.runner.unseen.popleft()
            engine._take_in(*engine.in_flight.popleft())
        engine.runner.kv_tokens[:] = -1
        if engine.runner.states is not None:
            engine.runner.states.tokens = {FROM_ZERO: []}
        for state in (engine.runner.rows, engine.runner.known, engine.runner.computed, engine.runner.blocks):
            state.clear()
        engine.scheduler.start_over()
