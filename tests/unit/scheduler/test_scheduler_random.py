"""Random arrivals, aborts and limits: the tokens are always those of each request alone, and the books balance.

`FakeModelRunner` checks every context that it reads, `FakeEngineCore` the scheduler's invariants after every call.
"""

from typing import Any

from fake_engine_core import FakeEngineCore
from hypothesis import given, settings
from hypothesis import strategies as st

from raycore.errors import RequestTooLarge


@st.composite
def engines(draw: st.DrawFn) -> FakeEngineCore:
    block_size = draw(st.sampled_from([1, 2, 4]))
    max_num_seqs = draw(st.integers(1, 6))
    num_right = draw(st.sampled_from([None, [0], [5], [2, 0, 5, 1]]))
    tells_tokens = draw(st.booleans())
    depth = 1 if num_right and not tells_tokens else draw(st.sampled_from([1, 2, 3]))
    return FakeEngineCore(
        num_blocks=draw(st.integers(24, 120)) // block_size,
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
    )


# few tokens and few prompts, so that prefixes repeat
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=30)
REQUESTS = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([1, 2, 5, 15, 30]),
        "min_tokens": st.sampled_from([0, 1]),
        "eos_token_ids": st.sampled_from([[], [3], [3, 4, 5, 6]]),
        "stop_token_ids": st.sampled_from([None, [7, 8]]),
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


@settings(max_examples=80, deadline=None)
@given(engine=engines(), operations=st.lists(st.one_of(SUBMIT, SUBMIT, STEP, ABORT), max_size=24))
def test_batching_changes_no_tokens_logprobs_or_ends_of_random_requests(
    engine: FakeEngineCore, operations: list[tuple[Any, ...]]
) -> None:
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
        blocks = -(-(len(prompt) + options["max_tokens"] - 1) // engine.runner.block_size)
        assert blocks > len(engine.runner.kv_tokens)
