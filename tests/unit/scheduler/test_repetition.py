"""Which outputs end because they repeat themselves."""

from __future__ import annotations

import msgspec
import pytest
from fake_engine_core import FakeEngineCore, repeats
from hypothesis import given
from hypothesis import strategies as st

from raycore.messages import EngineRequest
from raycore.sampling_params import RepetitionDetectionParams, SamplingParams
from raycore.scheduler.request import RepetitionDetector, Request, RequestLimits

ASKED = RepetitionDetectionParams(max_pattern_size=2, min_count=3)


def admit(output: list[int], **params: object) -> Request:
    asked = SamplingParams(repetition_detection=ASKED, max_tokens=20, **params)  # type: ignore[arg-type]
    return RequestLimits(100, 64, 4, 100).admit(EngineRequest(1, "r", [5, 5, 5], asked, 0, output_token_ids=output), 0)


@given(
    output=st.lists(st.integers(0, 2), max_size=40),
    sizes=st.tuples(st.integers(0, 6), st.integers(0, 9)),
    min_count=st.integers(2, 5),
    num_before=st.integers(0, 40),
)
def test_an_output_repeats_itself_when_its_end_is_the_same_tokens_as_often_as_asked(
    output: list[int], sizes: tuple[int, int], min_count: int, num_before: int
) -> None:
    asked = RepetitionDetectionParams(max(sizes), min(sizes), min_count)
    detector = RepetitionDetector(asked, 40, output[:num_before])
    for index in range(num_before, len(output)):
        assert detector.add(output[index]) == repeats(output[: index + 1], asked)


def test_a_pattern_is_as_long_as_fits_into_the_output_as_often_as_asked() -> None:
    detector = RepetitionDetector(RepetitionDetectionParams(1 << 60, 0, 2), 6)
    assert [detector.add(token) for token in (1, 2, 3, 1, 2, 3)] == [False] * 5 + [True]


def test_a_request_ends_with_a_repetition_in_its_output_after_min_tokens() -> None:
    request = admit([])
    ends = [request.end_of(token, 4 + index) for index, token in enumerate([5, 5, 6, 5, 6, 5, 6])]
    assert ends == [None] * 6 + [("repetition", "repetition_detected")], "the prompt doesn't count"
    assert admit([7, 7]).end_of(7, 6) == ("repetition", "repetition_detected"), "a request that goes on elsewhere"
    request = admit([7, 7], min_tokens=4)
    assert request.end_of(7, 6) is None
    assert request.end_of(7, 7) == ("repetition", "repetition_detected")
    assert admit([7, 7], stop_token_ids=[7]).end_of(7, 6) == ("stop", 7)


@pytest.mark.parametrize("num_right", [None, [2, 0, 5, 1]])
def test_steps_in_flight_and_drafts_end_where_a_request_alone_ends(num_right: list[int] | None) -> None:
    engine = FakeEngineCore(depth=1 if num_right else 3, num_right=num_right)
    often = RepetitionDetectionParams(max_pattern_size=9, min_count=2)
    ids = [engine.submit([seed], seed=seed, max_tokens=100, repetition_detection=often) for seed in range(20)]
    engine.run()  # compares tokens and ends
    assert "repetition" in {engine.finished[each][0] for each in ids}


def test_parameters_cross_processes() -> None:
    params = SamplingParams(repetition_detection=ASKED)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    copy = params.snapshot()
    assert copy.repetition_detection is not params.repetition_detection
