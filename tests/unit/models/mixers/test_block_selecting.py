"""Indexers of blocks as config.json describes them."""

from __future__ import annotations

from typing import Any

import pytest

from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields
from raycore.models.mixers.block_selecting import BlockIndexer, parse_block_indexer
from raycore.models.multimodal import MINIMAX_M3_VL, text_family, text_fields
from raycore.models.spec import Parts

TEXTS = MINIMAX_M3_VL.text_families["minimax_m3_vl_text"]


def parts_of(**values: Any) -> Parts:
    config = JsonFields("config.json", TEXTS.convert_config(values), TEXTS.defaults)
    return TEXTS.parts(config)


def test_the_old_names_of_sizes_are_read() -> None:
    old = {
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 72,
        "sparse_block_size": 32,
        "sparse_topk_blocks": 9,
        "sparse_local_block": 2,
        "sparse_attention_freq": [0, 1, 1],
    }
    parts = parts_of(num_hidden_layers=3, sparse_attention_config=old, moe_layer_freq=[0, 0, 1])
    assert parts.indexer == BlockIndexer(72, 32, 9, 2, [False, True, True])
    assert parts.moe is not None
    assert parts.moe.sparse_layers == [False, False, True]


def test_no_layer_needs_an_indexer() -> None:
    assert parts_of(num_hidden_layers=2).indexer is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"index_n_heads": 3}, "num_key_value_heads=4"),
        ({"index_head_dim": 8}, "at least the 64 elements"),
        ({"index_local_blocks": 17}, "at most index_topk_blocks=16"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=named):
        parse_block_indexer(JsonFields("config.json", values, TEXTS.defaults), [True], 64)


@pytest.mark.parametrize("types", [["minimax_m3_sparse"], ["minimax_m3_sparse", "sliding_attention"]])
def test_types_of_layers_that_are_not_known_are_refused(types: list[str]) -> None:
    with pytest.raises(InvalidCheckpoint, match="layer_types"):
        parts_of(num_hidden_layers=2, layer_types=types)


PUBLISHED = {
    "num_hidden_layers": 3,
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "use_gemma_norm": True,
    "attention_output_gate": False,
}
SELECTION = {
    "use_sparse_attention": True,
    "sparse_attention_freq": [0, 1, 1],
    "sparse_disable_index_value": [0, 1, 1],
    "sparse_init_block": 0,
    "sparse_score_type": "max",
}


def test_what_published_files_say_is_computed() -> None:
    indexer = parts_of(**PUBLISHED, sparse_attention_config=SELECTION).indexer
    assert isinstance(indexer, BlockIndexer)
    assert indexer.layers == [False, True, True]


@pytest.mark.parametrize(
    "value",
    [
        {"use_routing_bias": False},
        {"use_qk_norm": False},
        {"qk_norm_type": "per_layer"},
        {"use_gemma_norm": False},
        {"attention_output_gate": True},
        {"use_sparse_attention": False},
        {"sparse_disable_index_value": [0, 1, 0]},
        {"sparse_init_block": 1},
        {"sparse_score_type": "lse"},
    ],
)
def test_what_is_not_computed_is_refused(value: dict[str, Any]) -> None:
    (key,) = value
    config = PUBLISHED | {"sparse_attention_config": SELECTION}
    config |= value if key in PUBLISHED else {"sparse_attention_config": SELECTION | value}
    with pytest.raises(InvalidCheckpoint, match=key):
        parts_of(**config)


def test_conversions_call_the_model_of_texts_otherwise() -> None:
    config = JsonFields("config.json", {"text_config": {"model_type": "minimax_m3"}}, {})
    assert text_family(MINIMAX_M3_VL, text_fields(config)) is TEXTS
