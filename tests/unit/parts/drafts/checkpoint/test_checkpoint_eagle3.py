"""Heads are read in both formats, and those that aren't supported are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from configs import SPEC
from drafting_checkpoints import head_config

from raycore.errors import InvalidCheckpoint
from raycore.parts.drafts.checkpoint.eagle3 import is_eagle3, load_eagle3_spec

TARGET = msgspec.structs.replace(SPEC, num_layers=12)
HEAD = head_config(TARGET.hidden_size, TARGET.vocab_size, draft_vocab_size=60)


def write(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_an_eagle3_head_in_its_authors_format_is_read(tmp_path: Path) -> None:
    config = {key: value for key, value in HEAD.items() if key != "eagle_aux_hidden_state_layer_ids"}
    spec, head = load_eagle3_spec(write(tmp_path, config), TARGET)
    assert (spec.architecture, spec.num_layers, spec.hidden_size) == ("LlamaForCausalLM", 1, TARGET.hidden_size)
    assert (head.draft_vocab_size, head.target_hidden_size) == (60, TARGET.hidden_size)
    assert head.target_layers == [2, 6, 9], "an early, a middle and a late layer"
    assert not head.norm_before_residual


def test_an_eagle3_head_in_the_format_of_speculators_is_read(tmp_path: Path) -> None:
    names = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 60,
        "eagle_aux_hidden_state_layer_ids": [9, 1, 5],
        "transformer_layer_config": {name: HEAD[name] for name in names} | {"model_type": "qwen3", "head_dim": 16},
    }
    spec, head = load_eagle3_spec(write(tmp_path, config), TARGET)
    assert (spec.architecture, spec.head_dim, spec.qk_norm) == ("Qwen3ForCausalLM", 16, "heads")
    assert head.target_layers == [1, 5, 9]
    assert head.norm_before_residual
    assert is_eagle3(tmp_path)


def test_target_layers_may_be_given_in_a_nested_eagle_config(tmp_path: Path) -> None:
    nested = {"eagle_aux_hidden_state_layer_ids": [0, 11], "use_aux_hidden_state": True}
    config = HEAD | {"eagle_config": nested, "eagle_aux_hidden_state_layer_ids": None}
    assert load_eagle3_spec(write(tmp_path, config), TARGET)[1].target_layers == [0, 11]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers=2: expected 1"),
        ({"vocab_size": 99}, "vocab_size=99: expected 128, as the target has"),
        ({"hidden_size": 48}, "hidden_size=48: expected 32, the target's hidden_size"),
        ({"target_hidden_size": 48}, "target_hidden_size=48: expected 32"),
        ({"draft_vocab_size": 129}, "draft_vocab_size=129: expected at most vocab_size=128"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 12]}, r"layer_ids=\[0, 12\]: expected a list of the target's layers"),
        ({"fc_norm": True}, "fc_norm=True: expected False"),
        ({"norm_before_fc": True}, "norm_before_fc=True: expected False"),
        ({"norm_output": True}, "norm_output=True: expected False"),
        ({"parallel_drafting": True}, "parallel_drafting=True: expected False"),
        ({"logit_scale": 2.0}, "logit_scale=2.0: expected 1.0"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False: expected true"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "architectures="),
    ],
)
def test_unsupported_eagle_heads_are_refused_by_the_setting(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        load_eagle3_spec(write(tmp_path, HEAD | changes), TARGET)


def test_a_target_with_few_layers_needs_its_target_layers_given(tmp_path: Path) -> None:
    config = HEAD | {"eagle_aux_hidden_state_layer_ids": None}
    with pytest.raises(InvalidCheckpoint, match="eagle_aux_hidden_state_layer_ids is missing: expected a list"):
        load_eagle3_spec(write(tmp_path, config), msgspec.structs.replace(TARGET, num_layers=2))


@pytest.mark.parametrize(
    ("config", "is_head"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, True),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, True),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, True),
        ({"architectures": ["LlamaForCausalLM"]}, False),
        ({}, False),
    ],
)
def test_eagle3_heads_are_distinguished_from_models(tmp_path: Path, config: dict[str, Any], is_head: bool) -> None:
    path = tmp_path / "checkpoint"  # the directory's name counts, too
    path.mkdir()
    assert is_eagle3(write(path, config)) == is_head
    assert not is_eagle3(tmp_path / "nothing")
