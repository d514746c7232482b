"""Results of requests that pool reach their callers, and are counted without output tokens."""

from __future__ import annotations

import numpy as np
import pytest
from asks import checked

from raycore.client.output_processor import OutputProcessor
from raycore.client.recorder import Recorder
from raycore.client.request_state import PooledOutput
from raycore.demo import demo_model_path
from raycore.errors import InvalidRequest, RequestFailed
from raycore.messages import NO_LOAD, FinishedRequest, OutputBatch, Pooled
from raycore.parts.pooling.client.pooling import not_generating, not_pooling, pooling_for_each, resolved
from raycore.parts.pooling.client.pooling_calls import paired
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import PoolingParams
from raycore.text.tokenizer import Tokenizer

POOLED = Pooled(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32).tobytes(), [2, 2])
SPEC = PoolingSpec(tasks=["classify", "token_classify"], embedding_size=4, num_labels=3)


@pytest.fixture
def processor() -> OutputProcessor:
    processor = OutputProcessor(Tokenizer.from_dir(demo_model_path()), iter(range(100)).__next__)
    processor.add(checked("a", [5, 6, 7], PoolingParams(), text="text"), [1])
    return processor


def end_of(seq_id: int, reason: str = "stop") -> OutputBatch:
    return OutputBatch(
        started=[(seq_id, 2)],
        queued=[(seq_id, 0.5)],
        pooled=[(seq_id, POOLED)] if reason == "stop" else [],
        finished=[FinishedRequest(seq_id, reason)],
        steps=[(0, 0.0, 0.1)],
    )


def test_a_result_comes_with_the_end_of_its_request(processor):
    step = processor.process(end_of(1))
    (update,) = step.updates
    assert isinstance(update.output, PooledOutput)
    assert update.is_last
    found = update.output.result()
    np.testing.assert_array_equal(found.outputs.data, [[1, 2], [3, 4]])
    assert (found.request_id, found.prompt_token_ids, found.num_cached_tokens) == ("a", [5, 6, 7], 2)
    assert found.finished
    assert set(found.metrics) == {"arrival_s", "finished_s"}
    assert "a" not in processor


def test_a_result_is_counted_by_its_prompt(processor):
    recorder = Recorder(100)
    recorder.add_rank(0)
    recorder.take(0, NO_LOAD, NO_LOAD, processor.process(end_of(1)))
    (counts,) = recorder.counts().values()
    assert (counts.num_prompt_tokens, counts.num_cached_prompt_tokens, counts.num_output_tokens) == (3, 2, 0)
    assert counts.num_finished["stop"] == 1
    sums = counts.prompt_tokens.sum, counts.computed_prompt_tokens.sum, counts.step_tokens.sum, counts.queue_s.sum
    assert sums == (3, 1, 3, 0.5)
    assert sum(counts.first_token_s.counts) == sum(counts.output_tokens.counts) == sum(counts.n.counts) == 0


def test_a_request_that_moves_to_another_rank_gets_its_result_from_there(processor):
    assert processor.rebind(1, 2) == []
    assert processor.process(end_of(1)).updates == [], "it comes too late"
    (update,) = processor.process(end_of(2)).updates
    assert update.output.result().outputs.data.shape == (2, 2)


def test_an_aborted_request_has_no_result(processor):
    output = processor.abort("a")
    assert output.finished
    with pytest.raises(RequestFailed, match="a was aborted"):
        output.result()


@pytest.mark.parametrize(
    ("params", "task", "message"),
    [
        (PoolingParams(), "score", "task='score' isn't supported by this model.*it has 3 classes"),
        (None, "embed", "task='embed' isn't supported.*convert=\"embed\""),
        (None, "other", "task='other' isn't one of 'embed'"),
        (PoolingParams(task="classify"), "token_classify", "task='classify' in pooling_params"),
        (PoolingParams(dimensions=2), None, "dimensions=2"),
        ({}, None, "isn't PoolingParams"),
    ],
)
def test_parameters_that_the_model_cannot_follow_are_refused(params, task, message):
    with pytest.raises(InvalidRequest, match=message):
        resolved(params, task, SPEC)


def test_what_is_resolved_stays_as_it_is():
    once = resolved(PoolingParams(use_activation=False), "token_classify", SPEC)
    assert once == resolved(once, None, SPEC)
    assert once.skip_reading_prefix_cache


def test_errors_say_what_to_start_instead():
    assert 'runner="pooling")' in str(not_pooling("embed"))
    assert 'runner="pooling", convert="classify")' in str(not_pooling("score"))
    assert "'classify', 'token_classify'" in str(not_generating(SPEC))


def test_there_are_parameters_for_each_prompt():
    assert pooling_for_each(None, 2) == [None, None]
    each = [PoolingParams(), PoolingParams(task="embed")]
    assert pooling_for_each(each, 2) == each
    for wrong in (each, "embed", 3):
        with pytest.raises(InvalidRequest, match=r"pooling_params"):
            pooling_for_each(wrong, 3)


def test_one_text_is_paired_with_each_of_several():
    assert paired("a", ["b", "c"]) == (["a", "a"], ["b", "c"])
    assert paired(["a", "b"], ("c", "d")) == (["a", "b"], ["c", "d"])
    for first, second in ((["a", "b"], ["c"]), ("", "a"), ("a", []), ("a", [3]), (None, "a"), ("a\ud800", "b")):
        with pytest.raises(InvalidRequest, match=r"text"):
            paired(first, second)
