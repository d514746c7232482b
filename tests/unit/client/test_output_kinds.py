"""What callers get of a request's outputs: deltas, the end alone, or every few tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raycore.client.output_kinds import OutputKinds
from raycore.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput
from raycore.sampling_params import RequestOutputKind, SamplingParams

DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
TOKENS = [4, 5, 6, 7, 8]
TEXT = "abcdefghij"


def kinds(**params: Any) -> OutputKinds:
    found = OutputKinds.of(SamplingParams(**params))
    assert found is not None
    return found


def sequence(number: int, index: int = 0, reason: str | None = None, **fields: Any) -> CompletionOutput:
    return CompletionOutput(index, TEXT[: 2 * number], TOKENS[:number], finish_reason=reason, **fields)


def request(*sequences: CompletionOutput, finished: bool = False, **fields: Any) -> RequestOutput:
    return RequestOutput("r", "p", [1], outputs=list(sequences), finished=finished, **fields)


def test_outputs_stay_as_they_are_unless_something_else_is_asked_for() -> None:
    assert OutputKinds.of(SamplingParams()) is None
    assert OutputKinds.of(SamplingParams(stream_interval=1)) is None


@pytest.mark.parametrize(("own", "of_the_engine"), [(None, 3), (2, 3), (3, 1), (3, 2)])
def test_the_larger_interval_of_the_request_and_the_engine_counts(own: int | None, of_the_engine: int) -> None:
    taken = OutputKinds.of(SamplingParams(stream_interval=own), of_the_engine)
    assert taken is not None
    came = [number for number in range(1, 6) if taken.take(request(sequence(number))) is not None]
    assert came == [1, 4]


def test_deltas_of_any_outputs_add_up_to_the_whole() -> None:
    for taken in ([1, 2, 3, 4, 5], [1, 5], [2, 3, 5], [5]):
        asked = kinds(output_kind=DELTA)
        parts = [asked.take(request(sequence(n, reason="length" if n == 5 else None), finished=n == 5)) for n in taken]
        outputs = [each.outputs[0] for each in parts if each is not None]
        assert len(outputs) == len(taken)
        assert "".join(each.text for each in outputs) == TEXT
        assert [token for each in outputs for token in each.token_ids] == TOKENS
        assert [each.finish_reason for each in outputs] == [None] * (len(taken) - 1) + ["length"]


def test_deltas_tell_of_the_prompt_when_that_is_known_though_other_sequences_may_be_ahead() -> None:
    asked = kinds(output_kind=DELTA, n=2)
    prompt = {"prompt_logprobs": [None, {5: Logprob(-1.0)}], "prompt_hidden_states": np.zeros((2, 2), np.float32)}
    steps = [((0, 1), {"prompt_logprobs": [None, None]}), ((1, 2), prompt), ((2, 3), prompt)]
    parts = [asked.take(request(sequence(one), sequence(other, 1), **known)) for (one, other), known in steps]
    told = [each is not None and each.prompt_logprobs for each in parts]
    assert told == [None, prompt["prompt_logprobs"], None]
    assert [each is not None and each.prompt_hidden_states is not None for each in parts] == [False, True, False]


def test_deltas_have_their_own_logprobs_and_states_and_the_prompts_once() -> None:
    def whole(number: int, logprobs: Any) -> RequestOutput:
        states = np.arange(number * 2, dtype=np.float32).reshape(number, 2)
        part = sequence(number, logprobs=logprobs, cumulative_logprob=-float(number), hidden_states=states)
        return request(part, prompt_logprobs=[None], prompt_hidden_states=np.zeros((1, 2), np.float32))

    every = [{token: Logprob(-1.0)} for token in TOKENS]
    for container in (list, FlatLogprobs):
        asked = kinds(output_kind=DELTA)
        first, second = (asked.take(whole(number, container(every[:number]))) for number in (2, 3))
        assert first is not None
        assert second is not None
        assert first.outputs[0].logprobs == every[:2]
        assert second.outputs[0].logprobs == every[2:3]
        assert type(second.outputs[0].logprobs) is container
        assert second.outputs[0].cumulative_logprob == -3.0
        states = second.outputs[0].hidden_states
        assert states is not None
        assert states.tolist() == [[4.0, 5.0]]
        assert (first.prompt_logprobs, second.prompt_logprobs) == ([None], None)
        assert first.prompt_hidden_states is not None
        assert second.prompt_hidden_states is None


def test_deltas_leave_out_sequences_without_news() -> None:
    asked = kinds(output_kind=DELTA, n=2)
    first = asked.take(request(sequence(1), sequence(0, 1)))
    second = asked.take(request(sequence(2, reason="stop"), sequence(2, 1)))
    third = asked.take(request(sequence(2, reason="stop"), sequence(2, 1, "abort"), finished=True))
    taken = [
        [(each.index, len(each.token_ids), each.finish_reason) for each in output.outputs]
        for output in (first, second, third)
        if output is not None
    ]
    assert taken == [[(0, 1, None)], [(0, 1, "stop"), (1, 2, None)], [(1, 0, "abort")]]


def test_whole_outputs_are_not_changed() -> None:
    whole = request(sequence(3))
    asked = kinds(output_kind=DELTA)
    asked.take(request(sequence(1)))
    asked.take(whole)
    assert whole == request(sequence(3))


def test_an_end_alone_and_intervals() -> None:
    outputs = [request(sequence(n), finished=n == 5) for n in (1, 2, 3, 4, 5)]
    final, cumulative = kinds(output_kind=FINAL_ONLY), kinds(stream_interval=3)
    assert [final.take(each) for each in outputs] == [None] * 4 + [outputs[4]]
    assert [cumulative.take(each) for each in outputs] == [outputs[0], None, None, outputs[3], outputs[4]]
    deltas = kinds(stream_interval=3, output_kind=DELTA)
    taken = [deltas.take(each) for each in outputs]
    assert [each.outputs[0].token_ids for each in taken if each is not None] == [[4], [5, 6, 7], [8]]
