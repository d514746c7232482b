"""Constrained requests on worker actors: the engine makes their masks, whatever the shape."""

from __future__ import annotations

import re
import sys
from typing import Any

import cloudpickle
import pytest

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path
from raycore.structured_outputs import StructuredOutputsParams

# workers can't import a test module, so what they are to call travels whole
cloudpickle.register_pickle_by_value(sys.modules[__name__])

REGEX = "([a-z]{2,9} ){12}"
PROMPTS = ["27 + 58 =" + " 1" * (seq * 3) for seq in range(10)]
PARAMS = [
    SamplingParams(
        temperature=0,
        max_tokens=60,
        ignore_eos=seq % 2 == 1,
        structured_outputs=StructuredOutputsParams(regex=REGEX) if seq % 2 == 0 else None,
    )
    for seq in range(10)
]
SHAPES: dict[str, dict[str, Any]] = {
    "tp 2": {"tensor_parallel_size": 2},
    "tp 2, two steps": {"tensor_parallel_size": 2, "async_scheduling": True},
    "tp 2, three steps": {"tensor_parallel_size": 2, "max_concurrent_batches": 3},
    "pp 2": {"pipeline_parallel_size": 2},
    "pp 2, four steps": {"pipeline_parallel_size": 2, "max_concurrent_batches": 4},
    "pp 3": {"pipeline_parallel_size": 3},
    "pp 2, drafts": {
        "pipeline_parallel_size": 2,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    },
}


def num_compiled(worker: Any) -> int:
    return len(worker._core.grammars._compiled)


def outputs_of(**options: Any) -> tuple[list[list[int]], list[int]]:
    """The outputs, and how many grammars each worker has compiled."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 60, "block_size": 8}
    with LLM(demo_model_path(), dtype="float32", num_threads=1, standby_delay_s=None, **limits, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        for output, params in zip(outputs, PARAMS, strict=True):
            if params.structured_outputs is not None:
                assert re.fullmatch(REGEX, output.outputs[0].text)
        return [output.outputs[0].token_ids for output in outputs], llm.collective_rpc(num_compiled)


@pytest.fixture(scope="module")
def alone(ray_cluster) -> list[list[int]]:
    return outputs_of()[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_of_worker_actors_with_masks_are_those_of_one_worker(alone: list[list[int]], shape: str) -> None:
    outputs, nums_compiled = outputs_of(**SHAPES[shape])
    assert outputs == alone
    assert set(nums_compiled) == {0}, "only the engine follows the grammars"
