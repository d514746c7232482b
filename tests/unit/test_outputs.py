"""Outputs: vLLM's names and order, times, and flat log probabilities."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from raycore.outputs import (
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    FlatLogprobs,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    ScoringRequestOutput,
)


def test_outputs_can_be_made_in_vllms_order() -> None:
    part = CompletionOutput(0, "x", [1], -0.5, [{1: Logprob(-0.5)}], None, "stop", 7)
    assert (part.finish_reason, part.stop_reason, part.finished()) == ("stop", 7, True)
    output = RequestOutput("r", "p", [1], None, [part], True)
    assert (output.outputs, output.finished, output.metrics) == ([part], True, None)
    assert (output.encoder_prompt, output.lora_request, part.routed_experts) == (None, None, None)
    assert output == RequestOutput(
        request_id="r", prompt="p", prompt_token_ids=[1], prompt_logprobs=None, outputs=[part], finished=True
    )


def test_outputs_of_pooling_have_types_of_their_own() -> None:
    pooled = PoolingRequestOutput("r", PoolingOutput(np.array([0.25], np.float32)), [1], 0, True)
    for kind, value in (
        (EmbeddingRequestOutput, "embedding"),
        (ClassificationRequestOutput, "probs"),
        (ScoringRequestOutput, "score"),
    ):
        output = kind.from_base(pooled)
        assert type(output) is kind
        assert getattr(output.outputs, value) in ([0.25], 0.25)
        assert (output.request_id, output.prompt_token_ids, output.num_cached_tokens) == ("r", [1], 0)


def test_times_have_vllms_names_and_can_be_read_by_index() -> None:
    metrics = RequestMetrics(10.0, 1000.0)
    assert dict(metrics) == {"arrival_s": 10.0}
    assert (metrics.first_token_time, metrics.finished_time, metrics.first_scheduled_time) == (None, None, None)
    assert (metrics.first_token_ts, metrics.scheduled_ts, metrics.first_token_latency) == (0.0, 0.0, 0.0)
    metrics.queue_s, metrics.first_token_s, metrics.last_token_s, metrics.finished_s = 0.5, 11.0, 13.0, 14.0
    assert (metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time) == (1000.0, 1000.5, 1001.0)
    assert (metrics.last_token_time, metrics.finished_time, metrics.time_in_queue) == (1003.0, 1004.0, 0.5)
    assert (metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts) == (10.0, 10.5, 11.0)
    assert (metrics.last_token_ts, metrics.first_token_latency) == (13.0, 1.0)
    assert dict(metrics) == {"arrival_s": 10.0, "first_token_s": 11.0, "last_token_s": 13.0, "finished_s": 14.0}
    assert metrics.get("other") is None
    assert pickle.loads(pickle.dumps(metrics)) == metrics
    metrics.finished_s = None
    with pytest.raises(KeyError):
        metrics["finished_s"]


def test_flat_logprobs_behave_as_a_list_of_dicts() -> None:
    positions = [{1: Logprob(-1.0, 2, "a"), 5: Logprob(-0.5, 1, "b")}, {2: Logprob(-2.0, 1, None)}, {}]
    flat = FlatLogprobs([*positions[:2], None])
    assert len(flat) == 3
    assert list(flat) == positions
    assert flat == [*positions[:2], None]
    assert flat != positions[:2]
    assert (flat[-2], flat[1:]) == (positions[1], positions[1:])
    assert isinstance(flat[1:], FlatLogprobs)
    assert flat[::-1] == positions[::-1]
    assert (flat.start_indices, flat.end_indices, flat.token_ids) == ([0, 2, 3], [2, 3, 3], [1, 5, 2])
    assert (flat.logprobs, flat.ranks, flat.decoded_tokens) == ([-1.0, -0.5, -2.0], [2, 1, 1], ["a", "b", None])
    copied = flat.copy()
    del flat[1:]
    flat.append({9: Logprob(-3.0)})
    assert flat == [positions[0], {9: Logprob(-3.0)}]
    assert copied == positions
    with pytest.raises(IndexError):
        flat[2]
