"""Outputs say which weights their tokens come from."""

import numpy as np
import pytest
from asks import checked

from raycore.client.output_processor import OutputProcessor
from raycore.errors import InvalidRequest, RequestFailed, WeightVersionChanged
from raycore.messages import FIRST_WEIGHTS, FinishedRequest, WeightVersion
from raycore.outputs import WeightVersionSpan as Span
from raycore.sampling_params import SamplingParams
from raycore.scheduler.outputs import StepOutputs

V1, V2 = WeightVersion(1, "v1"), WeightVersion(2, "v2")


def step(version, *seq_ids, finished=()):
    ends = [FinishedRequest(seq_id, "length") for seq_id in finished]
    ids = np.array(seq_ids, np.int64)
    return StepOutputs(seq_ids=ids, token_ids=np.full(len(ids), 7, np.int32), version=version, finished=ends), 0.0


def merged(*steps):
    return StepOutputs.merge(steps, 0.0)


@pytest.fixture
def outputs(tokenizer):
    return OutputProcessor(tokenizer)


def add(outputs, *seq_ids, request_id="r", **params):
    outputs.add(checked(request_id, [1], SamplingParams(n=len(seq_ids), **params), stream=True), list(seq_ids))


def spans(processed):
    output = next(each.output for each in reversed(processed.updates) if each.output is not None)
    return [each.weight_versions for each in output.outputs]


def test_a_batch_says_nothing_of_the_first_weights_and_names_others_where_they_begin():
    assert merged(step(FIRST_WEIGHTS, 1, 2)).versions == []
    assert merged(step(FIRST_WEIGHTS, 1, 2), step(V1, 1), step(V1, 2), step(V2, 1)).versions == [(2, V1), (4, V2)]
    assert merged(step(V1), step(FIRST_WEIGHTS, 1)).versions == [], "a step without tokens has no version"


def test_each_client_is_told_the_version_of_its_own_tokens():
    far = 1 << 40
    parts = dict(step(V1, 1, far)[0].by_client())
    assert [merged((parts[client], 0.0)).versions for client in (0, 1)] == [[(0, V1)], [(0, V1)]]


def test_a_finished_output_has_one_span_if_the_weights_have_not_changed(outputs):
    add(outputs, 1)
    assert spans(outputs.process(merged(step(FIRST_WEIGHTS, 1)))) == [None], "it isn't finished"
    assert spans(outputs.process(merged(step(FIRST_WEIGHTS, 1, finished=[1])))) == [[Span("default", 0, 2)]]


def test_an_output_has_a_span_for_each_version_in_order_without_gaps(outputs):
    add(outputs, 1)
    outputs.process(merged(step(FIRST_WEIGHTS, 1), step(FIRST_WEIGHTS, 1)))
    outputs.process(merged(step(V1, 1)))
    done = outputs.process(merged(step(V2, 1), step(V2, 1, finished=[1])))
    assert spans(done) == [[Span("default", 0, 2), Span("v1", 2, 3), Span("v2", 3, 5)]]


def test_versions_change_in_the_middle_of_a_batch_also_for_sequences_that_begin_there(outputs):
    add(outputs, 1)
    add(outputs, 2, request_id="late")
    add(outputs, 3, request_id="latest")
    steps = [step(FIRST_WEIGHTS, 1), step(FIRST_WEIGHTS, 1, 1), step(V1, 2, 1), step(V1, 2, finished=[2])]
    assert spans(outputs.process(merged(*steps))) == [[Span("v1", 0, 2)]]
    assert spans(outputs.process(merged(step(V1, 1, finished=[1])))) == [[Span("default", 0, 3), Span("v1", 3, 5)]]
    assert spans(outputs.process(merged(step(V1, 3, finished=[3])))) == [[Span("v1", 0, 1)]]


def test_two_ranks_that_change_one_after_the_other_do_not_confuse_each_others_sequences(outputs):
    add(outputs, 1)
    add(outputs, 2, request_id="other")
    for version, seq_id in ((FIRST_WEIGHTS, 1), (V1, 2), (FIRST_WEIGHTS, 1), (V1, 2), (V1, 1)):
        outputs.process(merged(step(version, seq_id)))
    assert spans(outputs.process(merged(step(V1, 2, finished=[2])))) == [[Span("v1", 0, 3)]]
    assert spans(outputs.process(merged(step(V1, 1, finished=[1])))) == [[Span("default", 0, 2), Span("v1", 2, 4)]]


def test_a_sequence_that_moves_to_another_rank_has_the_versions_of_both(outputs):
    add(outputs, 1)
    add(outputs, 2, request_id="other")
    outputs.process(merged(step(V1, 1)))
    outputs.rebind(1, 11)
    outputs.process(merged(step(V2, 2)))
    outputs.process(merged(step(V2, 11)))
    assert spans(outputs.process(merged(step(V2, 11, finished=[11])))) == [[Span("v1", 0, 1), Span("v2", 1, 3)]]


def test_a_change_to_weights_of_the_same_name_is_one_span(outputs):
    add(outputs, 1)
    outputs.process(merged(step(WeightVersion(1, "default"), 1)))
    done = outputs.process(merged(step(WeightVersion(2, "default"), 1, finished=[1])))
    assert spans(done) == [[Span("default", 0, 2)]]


def test_spans_end_where_a_stop_string_ends_the_output(outputs, tokenizer):
    ids = [*tokenizer.encode("the fox"), *tokenizer.encode("dog")]
    stop = tokenizer.decode(ids[1:2])
    outputs.add(checked("r", [1], SamplingParams(stop=[stop])), [1])
    parts = [step(V1 if index > 1 else FIRST_WEIGHTS, 1) for index in range(len(ids))]
    for token_id, (part, _) in zip(ids, parts, strict=True):
        part.token_ids = np.array([token_id], np.int32)
    [update] = outputs.process(merged(*parts)).updates
    [completion] = update.output.outputs
    assert completion.token_ids == ids[:2]
    assert completion.weight_versions == [Span("default", 0, 2)]


def test_an_aborted_request_without_tokens_has_no_spans(outputs):
    add(outputs, 1)
    assert [each.weight_versions for each in outputs.abort("r").outputs] == [[]]


def test_a_request_that_asks_for_it_fails_when_the_weights_change_and_others_go_on(outputs):
    add(outputs, 1, 2, request_id="fails", on_version_change="fail", temperature=1.0)
    add(outputs, 3, request_id="goes on")
    outputs.process(merged(step(V1, 1, 2, 3)))
    outputs.process(merged(step(V1, 1, 2, 3)))
    changed = outputs.process(merged(step(V2, 1, 2, 3)))
    [failure] = [each for each in changed.updates if each.error is not None]
    assert failure.request_id == "fails"
    assert isinstance(failure.error, WeightVersionChanged)
    assert isinstance(failure.error, RequestFailed)
    assert "from version 'v1' to 'v2' after 2 tokens" in str(failure.error)
    assert sorted(changed.aborts) == [1, 2]
    assert "fails" not in outputs
    assert spans(outputs.process(merged(step(V2, 3, finished=[3])))) == [[Span("v1", 0, 2), Span("v2", 2, 4)]]


def test_another_name_of_the_same_weights_fails_no_request(outputs):
    add(outputs, 1, on_version_change="fail")
    outputs.process(merged(step(V1, 1)))
    renamed = WeightVersion(V1.number, "renamed")
    outputs.process(merged(step(renamed, 1)))
    assert spans(outputs.process(merged(step(renamed, 1, finished=[1])))) == [
        [Span("v1", 0, 1), Span("renamed", 1, 3)],
    ]


def test_a_request_that_begins_after_the_change_does_not_fail(outputs):
    outputs.process(merged(step(V1, 9)))
    add(outputs, 1, on_version_change="fail")
    outputs.process(merged(step(V2, 1)))
    assert spans(outputs.process(merged(step(V2, 1, finished=[1])))) == [[Span("v2", 0, 2)]]


def test_the_parameter_takes_two_values():
    with pytest.raises(InvalidRequest, match="on_version_change='stop' isn't 'continue' or 'fail'"):
        SamplingParams(on_version_change="stop")
