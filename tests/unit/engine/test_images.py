"""Prompts with images, in one engine, beside transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vision_checkpoints import (
    IMAGE,
    KINDS,
    Prompt,
    Prompts,
    greedy,
    image,
    make_vision_checkpoint,
)

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass
class Case:
    """A checkpoint, prompts for it, and what transformers generates from them."""

    path: Path
    prompts: list[Prompt]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = make_vision_checkpoint(request.param, tmp_path_factory.mktemp("images"))
    prompts = Prompts(path)
    made = [
        prompts.make(f"What is in this image? {IMAGE} Describe it.", [image(120, 90)]),
        prompts.make(f"What is in this image? {IMAGE} Describe it.", [image(120, 90, 1)]),
        prompts.make(f"{IMAGE} and{IMAGE} What is in that one?", [image(90, 150, 2), image(230, 60, 3)]),
        prompts.make("Describe the colours, please.", []),
        prompts.make(f"{IMAGE}", [image(200, 200, 1)]),
    ]
    expected = greedy(path, made, NUM_TOKENS)
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "prompts should matter"
    return Case(path, made, expected)


def generate(case: Case, **options: Any) -> list[list[int]]:
    options = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64} | options
    config = resolve(case.path, **options)
    core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
    outputs: list[list[int]] = [[] for _ in case.prompts]
    for seq_id, prompt in enumerate(case.prompts):
        core.submit(
            EngineRequest(
                seq_id,
                str(seq_id),
                prompt.token_ids,
                GREEDY,
                seed=0,
                features=prompt.features,
                feature_data=[*prompt.data],
            )
        )
    while core.has_work():
        step = core.step()
        if step is None:
            continue
        assert not step.missing_features
        for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
            outputs[seq_id].append(token)
    core.shutdown()
    return outputs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_backend": "torch"},
        {"max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 24, "attention_backend": "torch", "max_num_seqs": 2},
        {"enable_prefix_caching": False, "block_size": 4},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_tokens_are_those_of_transformers(case: Case, options: dict[str, Any]) -> None:
    assert generate(case, **options) == case.expected
