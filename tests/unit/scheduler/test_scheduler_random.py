"""Random arrivals, aborts and limits: the tokens are always those of each request alone, and the books balance.

`FakeModelRunner` checks every context that it reads, `FakeEngineCore` the scheduler's invariants after every call.
"""

from typing import Any

from fake_engine_core import FakeEngineCore
from hypothesis import given, settings
from hypothesis import strategies as st

from raycore.errors import RequestTooLarge
from raycore.kvcache.prefix_cache import CachedPrefix
from raycore.sampling_params import RepetitionDetectionParams

WINDOWS = st.sampled_from([None, 1, 2, 3, 7, 12])


@st.composite
def engines(draw: st.DrawFn, windows: st.SearchStrategy[list[int | None]]) -> FakeEngineCore:
    own = draw(windows)
    block_size = draw(st.sampled_from([1, 2, 4]))
    max_num_seqs = draw(st.integers(1, 6))
    num_right = draw(st.sampled_from([None, [0], [5], [2, 0, 5, 1]]))
    tells_tokens = draw(st.booleans())
    workers_draft = bool(num_right) and not tells_tokens and draw(st.booleans())
    depth = 1 if num_right and not tells_tokens and not workers_draft else draw(st.sampled_from([1, 2, 3]))
    return FakeEngineCore(
        num_blocks=draw(st.integers(24, 120)) * len(own) // block_size,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([0, 1, 5, 40])),
        enable_prefix_caching=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])),
        depth=depth,
        tells_tokens=tells_tokens,
        num_turns=draw(st.sampled_from([1, depth, max(1, depth - 1)])),
        num_right=num_right,
        windows=own,
        num_prefix_states=draw(st.sampled_from([None, 0, 1, 4, 30])),
        mamba_block_size=draw(st.sampled_from([None, block_size, 3 * block_size])),
        has_experts=own[0] is None and draw(st.booleans()),
        workers_draft=workers_draft,
        drafts_ahead=workers_draft and draw(st.booleans()),
    )


# few tokens and few prompts, so that prefixes repeat
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=30)
REQUESTS = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([1, 2, 5, 15, 30]),
        "min_tokens": st.sampled_from([0, 1]),
        "eos_token_ids": st.sampled_from([[], [3], [3, 4, 5, 6]]),
        "stop_token_ids": st.sampled_from([None, [7, 8]]),
        "repetition_detection": st.sampled_from([None, None, RepetitionDetectionParams(4, 0, 2)]),
        "seed": st.integers(0, 2),
        "priority": st.integers(0, 2),
        "flush_interval_s": st.sampled_from([0.0, 0.1, 0.2]),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
        "logprobs": st.sampled_from([None, 1]),
        "bad_words_token_ids": st.sampled_from([[], [], [[3]], [[3, 4]]]),
    }
)
SUBMIT = st.tuples(st.just("submit"), PROMPTS, REQUESTS)
STEP = st.tuples(st.just("step"), st.integers(1, 6))
ABORT = st.tuples(st.just("abort"), st.integers(0, 30))


OPERATIONS = st.lists(st.one_of(SUBMIT, SUBMIT, STEP, ABORT), max_size=24)


@settings(max_examples=80)
@given(engine=engines(st.just([None])), operations=OPERATIONS)
def test_batching_changes_no_tokens_logprobs_or_ends_of_random_requests(
    engine: FakeEngineCore, operations: list[tuple[Any, ...]]
) -> None:
    run(engine, operations)


@settings(max_examples=80)
@given(engine=engines(st.lists(WINDOWS, min_size=1, max_size=4)), operations=OPERATIONS)
def test_groups_of_layers_with_windows_change_nothing_either(
    engine: FakeEngineCore, operations: list[tuple[Any, ...]]
) -> None:
    check_hits(engine)
    run(engine, operations)


@settings(max_examples=150)
@given(
    windows=st.lists(WINDOWS, min_size=1, max_size=3),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.sampled_from([1, 2, 7, 16, 64]),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=40),
    max_tokens=st.integers(1, 23),
    num_right=st.sampled_from([None, [0], [5], [2, 0, 5, 1]]),
)
def test_a_request_that_is_admitted_finishes_alone_in_as_many_blocks_as_it_was_checked_for(
    windows: list[int | None],
    block_size: int,
    budget: int,
    prompt: list[int],
    max_tokens: int,
    num_right: list[int] | None,
) -> None:
    options: dict[str, Any] = {"block_size": block_size, "max_num_batched_tokens": budget, "max_num_seqs": 1}
    layout = FakeEngineCore(windows=windows, **options).layout
    num_blocks = layout.num_blocks_for(len(prompt) + max_tokens - 1)
    if not num_blocks:
        return
    engine = FakeEngineCore(num_blocks=num_blocks, windows=windows, num_right=num_right, **options)
    for length in (len(prompt), 1 + len(prompt) // 2, len(prompt)):
        engine.submit(prompt[:length], max_tokens=max_tokens, seed=length)
        engine.run()
    assert engine.scheduler.load().num_preemptions == 0


def check_hits(engine: FakeEngineCore) -> None:
    """Compare each prefix that is found in the cache with what all groups have."""
    windows, size, cache = engine.runner.windows, engine.runner.block_size, engine.scheduler._pool.prefix_cache
    match = cache.match

    def checked(digests: list[bytes], max_blocks: int) -> CachedPrefix:
        found = match(digests, max_blocks)
        held = [set(block_of) for block_of in cache._block_of]
        lengths = [
            length
            for length in range(max_blocks + 1)
            if all(
                digests[token // size] in of_group
                for of_group, window in zip(held, windows, strict=True)
                for token in range(0 if window is None else max(0, length * size - window + 1), length * size)
            )
        ]
        assert found.num_blocks == max(lengths)
        for group, blocks in enumerate(found.blocks):
            first = found.num_blocks - len(blocks)
            window = windows[group]
            assert first == (0 if window is None else max(0, found.num_blocks * size - window + 1) // size)
            assert blocks == [cache._block_of[group][digest] for digest in digests[first : found.num_blocks]]
        return found

    cache.match = checked


def run(engine: FakeEngineCore, operations: list[tuple[Any, ...]]) -> None:
    for operation, *arguments in operations:
        if operation == "submit":
            submit(engine, *arguments)
        elif operation == "step":
            for _ in range(arguments[0]):
                engine.step()
        elif arguments[0] in engine.requests:
            engine.abort(arguments[0])
        engine.scheduler.check_integrity()
    engine.run()
    for seq_id, request in engine.requests.items():
        if seq_id not in engine.aborted:
            if request.params.prompt_logprobs is not None:
                assert engine.prompt_logprobs.get(seq_id, []) == request.prompt_token_ids[1:]
            if request.params.logprobs is not None:
                assert engine.logprobs[seq_id] == engine.tokens[seq_id]


def submit(engine: FakeEngineCore, prompt: list[int], options: dict[str, Any]) -> None:
    try:
        engine.submit(prompt, **options)
    except RequestTooLarge:
        num_cached = min(len(prompt) + options["max_tokens"], engine.max_model_len) - 1
        assert engine.layout.num_blocks_for(num_cached) > len(engine.runner.kv_tokens)
