"""Features of prompts: what a step encodes, which embeddings workers keep, and where chunks end.

`FakeEncoder` checks in each step that the embeddings of all its tokens are there, and that they aren't too many.
"""

from contextlib import suppress
from typing import Any

import pytest
from fake_engine_core import FakeEngineCore
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_parts import part_of

from raycore.errors import InvalidRequest, RequestTooLarge
from raycore.messages import Feature, FeatureData
from raycore.parts.images.config import EncoderLimits
from raycore.parts.images.scheduler import EncoderInputs

IMAGE = 49


def with_features(parts: list[int | tuple[str, int]]) -> dict[str, Any]:
    """A prompt of tokens and (identifier, number of tokens) of features, with what a client sends of them."""
    tokens: list[int] = []
    features: list[Feature] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            features.append(Feature(part[0], len(tokens), part[1]))
            tokens += [IMAGE] * part[1]
    data = [FeatureData(feature.identifier.encode(), [1]) for feature in features]
    return {"prompt": tokens, "features": features, "feature_data": data}


def engine_of(cache_size: int = 16, *, is_divisible: bool = True, most: int | None = None, **options: Any):
    limits = EncoderLimits(cache_size, most or cache_size, is_divisible)
    return FakeEngineCore(encoder=limits, **options)


def test_an_image_is_encoded_in_the_step_of_its_first_token_and_once_for_all_chunks() -> None:
    engine = engine_of(max_num_batched_tokens=4)
    engine.submit(**with_features([1, 2, 3, 4, 5, ("a", 10), 6]), max_tokens=2)
    engine.run()
    encoded = [
        [feature.identifier for feature, _ in plan.encoder.inputs] if plan.encoder else [] for plan in engine.plans
    ]
    assert encoded[:5] == [[], ["a"], [], [], []]


def test_requests_share_an_images_embeddings_also_after_one_has_ended() -> None:
    engine = engine_of(enable_prefix_caching=False)
    for _ in range(2):
        for first in (1, 2):
            engine.submit(**with_features([first, ("a", 5), 3]), max_tokens=2)
        engine.run()
    assert engine.encoder.num_encoded == 1


def test_prefixes_are_shared_only_with_the_same_image_at_the_same_place() -> None:
    engine = engine_of(max_num_seqs=1)
    prompts = [[1, ("a", 8), 3, 4, 5], [1, ("b", 8), 3, 4, 5], [1, ("a", 8), 3, 4, 5], [1, *[IMAGE] * 8, 3, 4, 5]]
    for parts in prompts:
        engine.submit(**with_features(parts), max_tokens=1)
        engine.run()
    assert list(engine.started.values()) == [0, 0, 8, 0]
    assert engine.encoder.num_encoded == 2


def test_an_image_whose_tokens_are_cached_is_not_encoded_again() -> None:
    engine = engine_of(cache_size=8, max_num_seqs=1, max_num_batched_tokens=32)
    for parts in ([("a", 8), 1, 2], [("b", 8), 1, 2], [("a", 8), 1, 3]):
        engine.submit(**with_features(parts), max_tokens=1)
        engine.run()
    assert list(engine.started.values()) == [0, 0, 8]
    assert engine.encoder.num_encoded == 2


def test_a_chunk_ends_before_an_image_that_does_not_fit_beside_others_in_use() -> None:
    engine = engine_of(cache_size=8, max_num_batched_tokens=32)
    engine.submit(**with_features([1, ("a", 6), 2, ("b", 6), 3]), max_tokens=1)
    engine.step()
    assert [plan.num_step_tokens for plan in engine.plans] == [8]
    engine.run()
    assert engine.plans[1].encoder.freed == ["a"]


def test_the_least_recently_used_embeddings_give_way() -> None:
    engine = engine_of(cache_size=12, enable_prefix_caching=False, max_num_seqs=1)
    for identifier in "abcad":
        engine.submit(**with_features([1, (identifier, 4)]), max_tokens=1)
        engine.run()
    assert sorted(engine.encoder.kept) == ["a", "c", "d"]
    assert engine.encoder.num_encoded == 4


def test_an_image_that_cannot_be_divided_is_computed_in_one_step() -> None:
    engine = engine_of(is_divisible=False, max_num_batched_tokens=10, long_prefill_token_threshold=4)
    engine.submit(**with_features([1, 2, ("a", 9), 3, ("b", 3), ("c", 3)]), max_tokens=3)
    engine.submit(**with_features([5, 6, 7]), max_tokens=8)
    engine.run()
    assert sum(plan.num_step_tokens >= 9 for plan in engine.plans) == 1


def test_requests_wait_behind_an_image_that_needs_more_tokens_than_decodes_leave() -> None:
    engine = engine_of(is_divisible=False, max_num_batched_tokens=10, max_num_seqs=4)
    for number in range(3):
        engine.submit([number], max_tokens=6)
    engine.step()
    image = engine.submit(**with_features([("a", 10)]), max_tokens=1)
    later = [engine.submit([number, 1, 2], max_tokens=6) for number in range(9)]
    engine.run()
    assert engine.start_order[3:] == [image, *later]


@pytest.mark.parametrize(
    ("is_divisible", "why"), [(True, "at most 12"), (False, "at most 10, because one step computes")]
)
def test_an_image_that_could_never_be_computed_is_refused(is_divisible: bool, why: str) -> None:
    engine = engine_of(cache_size=12, is_divisible=is_divisible, most=12 if is_divisible else 10)
    with pytest.raises(RequestTooLarge, match=f"image 1 has 13 tokens.*{why}"):
        engine.submit(**with_features([("b", 2), ("a", 13)]))


def test_what_no_client_sends_is_refused() -> None:
    engine, data = engine_of(), FeatureData(b"", [0])
    for feature in (Feature("a", 3, 2), Feature("a", -1, 2), Feature("a", 0, 0)):
        with pytest.raises(InvalidRequest, match="feature 0"):
            engine.submit([1, 2, 3, 4], features=[feature], feature_data=[data])
    with pytest.raises(InvalidRequest, match="feature_data"):
        engine.submit([1, 2, 3, 4], features=[Feature("a", 0, 2)], feature_data=[None])
    with pytest.raises(InvalidRequest, match="only text"):
        FakeEngineCore().submit([1, 2, 3, 4], features=[Feature("a", 0, 2)], feature_data=[data])


def test_a_reset_drops_all_embeddings_and_computes_requests_again_that_use_some() -> None:
    engine = engine_of(max_num_batched_tokens=4, enable_prefix_caching=False)
    engine.submit(**with_features([("a", 10), 1, ("b", 2)]), max_tokens=2)
    engine.step()
    engine.scheduler.reset_encoder_cache()
    engine.scheduler.check_integrity()
    engine.run()
    assert engine.encoder.num_encoded == 3
    assert engine.scheduler.load().num_preemptions == 1


@st.composite
def engines(draw: st.DrawFn) -> FakeEngineCore:
    block_size, is_divisible = draw(st.sampled_from([1, 2, 4])), draw(st.booleans())
    max_num_seqs, cache_size = draw(st.integers(1, 5)), draw(st.sampled_from([6, 9, 20]))
    budget = max(max_num_seqs, 6) + draw(st.sampled_from([0, 1, 5, 30]))
    num_right = draw(st.sampled_from([None, None, [2, 0, 5, 1]]))
    tells_tokens = draw(st.booleans())
    depth = 1 if num_right and not tells_tokens else draw(st.sampled_from([1, 2, 3]))
    return FakeEngineCore(
        num_blocks=draw(st.integers(24, 90)) // block_size,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])),
        depth=depth,
        tells_tokens=tells_tokens,
        num_turns=draw(st.sampled_from([1, depth])),
        num_right=num_right,
        encoder=EncoderLimits(cache_size, 6, is_divisible),
    )


SIZES = {"a": 2, "b": 3, "c": 5, "d": 6, "e": 6, "f": 1}
PARTS = st.lists(st.one_of(st.integers(0, 1), st.sampled_from(sorted(SIZES.items()))), min_size=1, max_size=9)
OPTIONS = st.fixed_dictionaries(
    {
        "max_tokens": st.sampled_from([1, 2, 5, 15]),
        "priority": st.integers(0, 2),
        "seed": st.integers(0, 1),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
    }
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), PARTS, OPTIONS),
        st.tuples(st.just("submit"), PARTS, OPTIONS),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.sampled_from(["reset", "reset_prefixes", "start_over"])),
    ),
    max_size=24,
)


@settings(max_examples=150)
@given(engine=engines(), operations=OPERATIONS)
def test_every_token_of_random_features_has_its_embedding_and_nothing_is_left_in_use(
    engine: FakeEngineCore, operations: list[tuple[Any, ...]]
) -> None:
    for operation, *arguments in operations:
        if operation == "submit":
            with suppress(RequestTooLarge):
                engine.submit(**with_features(arguments[0]), **arguments[1])
        elif operation == "step":
            for _ in range(arguments[0]):
                engine.step()
        elif operation == "abort" and arguments[0] in engine.requests:
            engine.abort(arguments[0])
        elif operation == "reset":
            engine.scheduler.reset_encoder_cache()
        elif operation == "reset_prefixes":
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif operation == "start_over":
            finish_steps(engine)
            engine.scheduler.start_over()
            engine.encoder.kept.clear()
            lose_slots(engine)
        engine.scheduler.check_integrity()
    engine.run()
    assert not part_of(engine.scheduler, EncoderInputs)._num_users


def finish_steps(engine: FakeEngineCore) -> None:
    while engine.in_flight:
        engine.runner.unseen.popleft()
        engine._take_in(*engine.in_flight.popleft())


def lose_slots(engine: FakeEngineCore) -> None:
    """Workers have lost their slots and embeddings."""
    for state in (engine.runner.rows, engine.runner.known, engine.runner.computed, engine.runner.blocks):
        state.clear()
