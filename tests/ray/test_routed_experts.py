"""The experts that `LLM` returns are the same however a model is divided, and whichever ranks die."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import make_checkpoint, prompts
from faults import signal_in_step

from raycore import LLM, RequestOutput, RequestOutputKind, SamplingParams

NUM_NEW_TOKENS = 24
OPTIONS = {
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "batch_invariant": True,
    "enable_return_routed_experts": True,
    "device": "cpu",
}
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [(1, 256, 3)]}
TEXTS = [prompt[:16] for prompt in prompts()[:6]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mixtral", tmp_path_factory.mktemp("mixtral"), num_local_experts=8)


def generate(llm: LLM) -> list[RequestOutput]:
    kinds = [PARAMS, SAMPLED]
    given: Sequence[Any] = [{"prompt_token_ids": text} for text in TEXTS]
    return llm.generate(given, [kinds[index % 2] for index in range(len(TEXTS))], use_tqdm=False)


@pytest.fixture(scope="module")
def expected(checkpoint: Path, ray_cluster: None) -> list[RequestOutput]:
    with LLM(checkpoint, **OPTIONS) as llm:
        return generate(llm)


def check(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, reference in zip(found, expected, strict=True):
        for own, other in zip(output.outputs, reference.outputs, strict=True):
            assert own.token_ids == other.token_ids
            assert own.routed_experts is not None
            assert len(own.routed_experts) == len(output.prompt_token_ids) + NUM_NEW_TOKENS - 1
            assert np.array_equal(own.routed_experts, other.routed_experts)


@pytest.mark.parametrize(
    "shape",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "async_scheduling": True, "speculative_config": DRAFTS},
        {"pipeline_parallel_size": 2, "async_scheduling": True, "speculative_config": DRAFTS},
        {"data_parallel_size": 2, "enable_expert_parallel": True},
        {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True},
    ],
    ids=["TP", "PP", "PP and TP", "TP and drafts", "PP and drafts", "EP", "EP and TP"],
)
def test_they_are_the_same_in_all_shapes(
    shape: dict[str, Any], checkpoint: Path, expected: list[RequestOutput]
) -> None:
    with LLM(checkpoint, **OPTIONS, **shape) as llm:
        check(generate(llm), expected)


def test_a_lost_ranks_requests_have_all_of_them(checkpoint: Path, expected: list[RequestOutput]) -> None:
    with LLM(checkpoint, **OPTIONS, data_parallel_size=2) as llm:
        signal_in_step(llm, 1, llm.engine_infos[1].pid, 12)
        check(generate(llm), expected)


def test_deltas_end_with_all_of_them(checkpoint: Path, expected: list[RequestOutput]) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    with LLM(checkpoint, **OPTIONS) as llm:
        *deltas, last = llm.stream({"prompt_token_ids": TEXTS[0]}, params)
    assert deltas
    assert all(delta.outputs[0].routed_experts is None for delta in deltas)
    assert np.array_equal(last.outputs[0].routed_experts, expected[0].outputs[0].routed_experts)
