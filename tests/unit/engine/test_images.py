"""Prompts with images, in one engine, beside transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vision_checkpoints import (
    GEMMA3,
    IMAGE,
    KINDS,
    Prompt,
    Prompts,
    embeddings_of,
    greedy,
    image,
    make_vision_checkpoint,
)

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest, FeatureData
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


class Engine:
    """One engine, in this process."""

    def __init__(self, path: Path, **options: Any) -> None:
        options = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64} | options
        config = resolve(path, **options)
        self.core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
        self._num_submitted = 0

    def generate(self, prompts: list[Prompt], begun: list[list[int]] | None = None) -> list[list[int]]:
        """Return each prompt's tokens. `begun`: those that another engine has generated."""
        first = self._num_submitted
        for prompt, output in zip(prompts, begun or [[] for _ in prompts], strict=True):
            seq_id, self._num_submitted = self._num_submitted, self._num_submitted + 1
            features = {"features": prompt.features, "feature_data": [*prompt.data], "output_token_ids": output}
            self.core.submit(EngineRequest(seq_id, str(seq_id), prompt.token_ids, GREEDY, seed=0, **features))
        outputs: list[list[int]] = [[] for _ in prompts]
        while self.core.has_work():
            step = self.core.step()
            if step is None:
                continue
            assert not step.missing_features
            for seq_id, token in zip(step.seq_ids.tolist(), step.token_ids.tolist(), strict=True):
                outputs[seq_id - first].append(token)
        return outputs


def generate(case: Case, **options: Any) -> list[list[int]]:
    engine = Engine(case.path, **options)
    tokens = engine.generate(case.prompts)
    engine.core.shutdown()
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_backend": "torch"},
        {"max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 24, "attention_backend": "torch", "max_num_seqs": 2},
        {"enable_prefix_caching": False, "block_size": 4},
        {"dtype": "float32", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_tokens_are_those_of_transformers(case: Case, options: dict[str, Any]) -> None:
    assert generate(case, **options) == case.expected


def test_cached_prefixes_give_the_same_tokens(case: Case) -> None:
    engine = Engine(case.path, block_size=4)
    for _ in range(2):
        assert engine.generate(case.prompts) == case.expected
    assert engine.core.load().prefix_cache_hits > 0
    engine.core.shutdown()


def test_preempted_requests_give_the_same_tokens(case: Case) -> None:
    # with several groups of windows, each has blocks of its own
    engine = Engine(case.path, block_size=4, num_gpu_blocks_override=46 if case.path.name == GEMMA3 else 30)
    assert engine.generate(case.prompts) == case.expected
    assert engine.core.load().num_preemptions > 0
    engine.core.shutdown()


def test_requests_that_have_moved_continue_where_they_were(case: Case) -> None:
    engine = Engine(case.path)
    assert engine.generate(case.prompts, begun=[tokens[:5] for tokens in case.expected]) == [
        tokens[5:] for tokens in case.expected
    ]
    engine.core.shutdown()


def test_embeddings_may_come_with_a_request(case: Case) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(case.path, dtype=torch.float32)
    prompt, expected = case.prompts[0], case.expected[0]
    with torch.no_grad():
        embeddings = embeddings_of(model, prompt.pixels[0], prompt.features[0].grid)
    given = FeatureData(embeddings.numpy().tobytes(), list(embeddings.shape), is_embedding=True)
    engine = Engine(case.path)
    assert engine.generate([replace(prompt, data=[given])]) == [expected]
    engine.core.shutdown()
