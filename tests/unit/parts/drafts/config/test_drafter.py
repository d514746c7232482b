"""What drafts fits the target and the engine, or the engine says by name what doesn't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drafting_checkpoints import head_config

from raycore.config import EngineConfig, resolve
from raycore.demo import demo_model_path
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.parts.drafts.checkpoint.mtp import MtpSpec

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}

PREDICTING = DENSE | {
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


@pytest.fixture
def write(tmp_path: Path):
    def write(name: str, config: dict[str, Any]) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        return str(tmp_path / name)

    return write


def drafter_of(target: str, settings: dict[str, Any], **options: Any):
    return resolve(target, speculative_config={"num_speculative_tokens": 3} | settings, **options).drafter


def test_the_speculative_method_is_found_by_the_drafters_checkpoint(write) -> None:
    target, model = write("target", DENSE), write("model", DENSE | {"num_hidden_layers": 1})
    head = write("head", head_config(16, 64, head_dim=8))
    config = resolve(target, speculative_config={"model": model, "num_speculative_tokens": 3})
    assert config.speculative_config is not None
    assert config.speculative_config.method == "draft_model"
    assert config.max_steps_in_flight == 1
    found = drafter_of(target, {"model": head})
    assert found.head is not None
    assert found.head.target_layers == [0, 1, 3]
    assert (found.path, found.num_speculative_tokens, found.max_model_len) == (head, 3, 64)


@pytest.mark.parametrize(("num_layers", "num_used"), [(1, 1), (2, 2), (5, 3)])
def test_a_model_drafts_with_as_many_of_its_layers_as_there_may_be_drafts(write, num_layers, num_used) -> None:
    target = write("target", PREDICTING | {"num_nextn_predict_layers": num_layers})
    found = drafter_of(target, {"method": "mtp"}, tensor_parallel_size=2)
    assert isinstance(found.head, MtpSpec)
    assert found.head.target_layers == [5], "after the last norm"
    assert found.head.own_tensors(found.spec)[0] == "model.layers.4."
    assert found.head.tensors(found.spec, index=num_used - 1).layer == f"model.layers.{3 + num_used}."
    assert (found.path, found.tensor_parallel_size, found.max_model_len) == (target, 2, 64)
    assert found.spec.moe is not None
    assert (found.spec.num_layers, found.head.num_layers, found.spec.moe.sparse_layers) == (
        *(num_used, num_used),
        [True] * num_used,
    )
    config = resolve(target, speculative_config={"method": "mtp", "num_speculative_tokens": 3})
    assert config.reads_hidden_states
    assert EngineConfig.decode(config.encode()).drafter == config.drafter


def test_suffix_drafting_needs_no_draft_model() -> None:
    assert resolve(demo_model_path(), speculative_config={"method": "suffix"}).drafter is None


def test_the_draft_models_length_is_the_shortest_of_its_own_the_targets_and_the_option(write) -> None:
    target, short = write("target", DENSE), write("short", DENSE | {"max_position_embeddings": 40})
    head = write("head", head_config(16, 64, max_position_embeddings=16))
    assert drafter_of(target, {"model": short}).max_model_len == 40
    assert drafter_of(target, {"model": short}, max_model_len=30).max_model_len == 30
    assert drafter_of(target, {"model": short, "max_model_len": 20}).max_model_len == 20
    assert drafter_of(target, {"model": head}).max_model_len == 64, "a head has its target's positions"


def test_the_draft_model_is_split_over_all_workers_or_kept_by_one(write) -> None:
    target = write("target", DENSE)
    assert drafter_of(target, {"model": target}, tensor_parallel_size=2).tensor_parallel_size == 2
    settings = {"model": target, "draft_tensor_parallel_size": 1}
    assert drafter_of(target, settings, tensor_parallel_size=2).tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"model": "other"}, {}, "other has vocab_size=70, and the target has 64"),
        (
            {"model": "target"},
            {"pipeline_parallel_size": 2},
            "'draft_model' needs async_scheduling=True with pipeline_p",
        ),
        ({"model": "head"}, {"pipeline_parallel_size": 2}, "'eagle3' needs async_scheduling=True with pipeline_p"),
        (
            {"model": "target", "draft_tensor_parallel_size": 4},
            {"tensor_parallel_size": 2},
            "draft_tensor_parallel_size=4: expected 1 or tensor_parallel_size=2",
        ),
        (
            {"model": "head", "draft_tensor_parallel_size": 1},
            {"tensor_parallel_size": 2},
            "draft_tensor_parallel_size=1: a head of the target needs the target's tensor_parallel_size=2",
        ),
        ({"model": "target", "max_model_len": 65}, {}, "max_model_len=65 is above 64"),
        ({"model": "odd"}, {"tensor_parallel_size": 2}, "doesn't divide"),
        ({"method": "draft_model"}, {}, "method='draft_model' needs model"),
        ({"method": "mtp"}, {}, "target \\(Qwen3ForCausalLM\\) has no layer that predicts further tokens"),
        ({"method": "mtp"}, {"load_format": "sharded_state"}, "a layer .* that save_sharded_state\\(\\) leaves out"),
        ({"method": "ngram", "model": "target"}, {}, "model='target' is for drafts from a model"),
        ({"method": "medusa", "model": "target"}, {}, "medusa"),
        (
            {"model": "target", "revision": "main"},
            {},
            "revision='main' is not supported: a draft model named as on the hub",
        ),
        (
            {"model": "target", "quantization": "fp8"},
            {},
            "quantization='fp8' is not supported: draft models aren't quantized",
        ),
        ({"model": "target", "parallel_drafting": True}, {}, "parallel_drafting=True"),
        ({"model": "target", "use_heterogeneous_vocab": True}, {}, "use_heterogeneous_vocab=True"),
        ({"model": "target", "tensor_parallel_size": 1}, {}, "use draft_tensor_parallel_size"),
    ],
)
def test_drafters_that_do_not_fit_the_target_are_refused_by_name(
    write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings, options, message
) -> None:
    monkeypatch.chdir(tmp_path)
    write("target", DENSE)
    write("other", DENSE | {"vocab_size": 70})
    write("odd", DENSE | {"num_attention_heads": 3, "num_key_value_heads": 3})
    write("head", head_config(16, 64))
    with pytest.raises(InvalidConfig, match=message):
        drafter_of("target", settings, **options)


@pytest.mark.parametrize(
    ("config", "settings", "options", "message"),
    [
        ({"num_nextn_predict_layers": 0}, {}, {}, "has no layer that predicts further tokens"),
        (
            {
                "architectures": ["Step3p5ForCausalLM"],
                "num_nextn_predict_layers": 2,
                "mtp_layer_types": ["full_attention", "sliding_attention"],
            },
            *({}, {}, "but raycore doesn't compute these"),
        ),
        (
            *({}, {"draft_tensor_parallel_size": 1}, {"tensor_parallel_size": 2}),
            "draft_tensor_parallel_size=1: a head of the target needs the target's tensor_parallel_size=2",
        ),
        ({}, {}, {"pipeline_parallel_size": 2}, "'mtp' needs async_scheduling=True with pipeline_p"),
        ({}, {"max_model_len": 65}, {}, "max_model_len=65 is above 64"),
    ],
)
def test_layers_that_cannot_draft_are_refused_by_name(write, config, settings, options, message) -> None:
    with pytest.raises(InvalidConfig, match=message):
        drafter_of(write("target", PREDICTING | config), {"method": "mtp"} | settings, **options)


def test_a_draft_model_with_experts_is_refused_with_expert_parallelism(write) -> None:
    target = write("target", MIXTURE)
    with pytest.raises(InvalidConfig, match="has experts, which can't be used with enable_expert_parallel=True"):
        drafter_of(target, {"model": target}, enable_expert_parallel=True)
    assert drafter_of(target, {"model": target}).spec.moe is not None


def test_a_missing_draft_model_is_named(write) -> None:
    with pytest.raises(InvalidCheckpoint, match="/nowhere isn't a directory"):
        drafter_of(write("target", DENSE), {"model": "/nowhere"})
