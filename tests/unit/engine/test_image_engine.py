"""Prompts with images, in one engine, beside transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drafting_checkpoints import head_config, random_head, write_checkpoint
from image_prompts import Case, Prompting, config_of, make_case
from safetensors.torch import load_file, save_file
from vision_checkpoints import GEMMA3, MODELS, QWEN3_MOE, embeddings_of

from raycore.checkpoint.model_spec import load_model_spec
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import FeatureData
from raycore.worker.rank import RankIdentity


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp("images"))


def engine_of(path: Path, **options: Any) -> Prompting:
    config = config_of(path, **options)
    return Prompting(EngineCore(config, InlineExecutor(config, RankIdentity(0, 1))))


def generate(case: Case, **options: Any) -> list[list[int]]:
    engine = engine_of(case.path, **options)
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


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_change_no_token(case: Case, tmp_path: Path, depth: int) -> None:
    """What drafts sees an image's tokens, and no image."""
    spec = load_model_spec(case.path)
    config = head_config(
        spec.hidden_size, spec.vocab_size, eagle_aux_hidden_state_layer_ids=[*range(min(3, spec.num_layers))]
    )
    head = write_checkpoint(tmp_path / "head", config, random_head(config))
    for model in (head, case.path):
        always = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [(1, 8, 3)]}
        engine = engine_of(
            case.path,
            block_size=4,
            max_concurrent_batches=depth,
            speculative_config={"model": str(model)} | always,
        )
        for _ in range(2):  # the second time from cached prefixes
            assert engine.generate(case.prompts) == case.expected
        assert engine.core.load().drafts.num_draft_tokens > 50
        engine.core.shutdown()


def test_cached_prefixes_give_the_same_tokens(case: Case) -> None:
    engine = engine_of(case.path, block_size=4)
    for _ in range(2):
        assert engine.generate(case.prompts) == case.expected
    assert engine.core.load().prefix_cache_hits > 0
    engine.core.shutdown()


def test_embeddings_are_computed_anew_after_a_reset(case: Case) -> None:
    engine = engine_of(case.path, enable_prefix_caching=False)
    assert engine.generate(case.prompts) == case.expected
    kept = engine.core.executor._worker._core.runner._source.images._kept
    before = dict(kept)
    engine.core.utilities.functions["reset_encoder_cache"]()
    assert engine.generate(case.prompts) == case.expected
    assert before
    assert before.keys() == kept.keys()
    assert not any(kept[each] is before[each] for each in before)
    engine.core.shutdown()


def test_preempted_requests_give_the_same_tokens(case: Case) -> None:
    # with several groups of windows, each has blocks of its own
    engine = engine_of(case.path, block_size=4, num_gpu_blocks_override=46 if case.path.name == GEMMA3 else 30)
    assert engine.generate(case.prompts) == case.expected
    assert engine.core.load().num_preemptions > 0
    engine.core.shutdown()


def test_requests_that_have_moved_continue_where_they_were(case: Case) -> None:
    engine = engine_of(case.path)
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
    engine = engine_of(case.path)
    assert engine.generate([replace(prompt, data=[given])]) == [expected]
    engine.core.shutdown()


def test_stacked_experts_have_a_row_for_each_input_or_for_each_output(tmp_path: Path) -> None:
    case = make_case(QWEN3_MOE, tmp_path)
    assert load_model_spec(case.path).moe.is_transposed  # pyright: ignore
    assert generate(case) == case.expected, "transformers saves one for each output"
    file = case.path / "model.safetensors"
    tensors = {
        name: each.transpose(1, 2).contiguous() if ".experts." in name else each
        for name, each in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    assert generate(case) == case.expected
