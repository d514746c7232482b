"""Indexers as config.json describes them."""

from __future__ import annotations

from typing import Any

import pytest

from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields
from raycore.models.deepseek_v32 import DEEPSEEK_V32
from raycore.models.glm_moe_dsa import GLM_MOE_DSA, shared_layers
from raycore.models.mixers.selecting import Indexer, parse_indexer


def fields(**values: Any) -> JsonFields:
    return JsonFields("config.json", values, GLM_MOE_DSA.defaults)


def test_an_indexer_has_the_sizes_in_the_file() -> None:
    config = JsonFields("config.json", {"index_topk": 7}, DEEPSEEK_V32.defaults)
    assert parse_indexer(config, is_adjacent=False) == Indexer(64, 128, 7, is_adjacent=False)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"index_head_dim": 32}, "at least qk_rope_head_dim=64"),
        ({"index_topk": 0}, "index_topk"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=named):
        parse_indexer(fields(**values), is_adjacent=True)


@pytest.mark.parametrize(
    ("values", "shared"),
    [
        ({}, "FFFFF"),
        ({"indexer_types": ["full", "shared", "shared", "full", "shared"]}, "FSSFS"),
        ({"index_topk_pattern": "FFSSF"}, "FFSSF"),
        ({"index_topk_freq": 2}, "FFSFS"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, "FSSFS"),
    ],
)
def test_layers_share_what_the_file_says(values: dict[str, Any], shared: str) -> None:
    assert shared_layers(fields(num_hidden_layers=5, **values)) == [each == "S" for each in shared]


@pytest.mark.parametrize(
    "values",
    [
        {"indexer_types": ["full"] * 4},
        {"indexer_types": ["full", "full", "none", "full", "full"]},
        {"index_topk_pattern": "SFFFF"},
        {"index_topk_pattern": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 0},
    ],
)
def test_layers_that_can_share_nothing_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidCheckpoint, match=next(reversed(values))):
        shared_layers(fields(num_hidden_layers=5, **values))


@pytest.mark.parametrize(
    "values", [{"layer_types": ["full_attention"]}, {"indexer_rope_interleave": True}, {"mlp_bias": True}]
)
def test_what_is_not_computed_is_refused(values: dict[str, Any]) -> None:
    config = JsonFields("config.json", values, {**DEEPSEEK_V32.defaults, "head_dim": 64, "num_key_value_heads": 1})
    with pytest.raises(InvalidCheckpoint, match=next(iter(values))):
        DEEPSEEK_V32.parts(config)
