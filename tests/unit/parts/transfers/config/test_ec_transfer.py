"""An engine with a role gets what the role needs, and refuses what it can't have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raycore.config import resolve
from raycore.errors import InvalidConfig

SIZES: dict[str, Any] = {
    "vocab_size": 160000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"mrope_section": [2, 1, 1]},
}
VISION: dict[str, Any] = {
    "depth": 1,
    "num_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [],
}
PRODUCER = {"ec_connector": "ECStoreConnector", "ec_role": "ec_producer"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": VISION}))
    return str(tmp_path)


def resolved(checkpoint: str, **options: Any) -> Any:
    return resolve(checkpoint, load_format="dummy", ec_transfer_config=PRODUCER, **options)


def test_a_producer_has_only_the_encoder_and_keeps_no_prefixes(checkpoint: str) -> None:
    config, whole = resolved(checkpoint), resolve(checkpoint, load_format="dummy")
    assert (config.model.spec.encodes_only, config.model.spec.num_layers) == (True, 0)
    assert config.model.spec.vision == whole.model.spec.vision, "or embeddings of both would have other names"
    assert not config.cache.enable_prefix_caching
    for role in ("ec_consumer", "ec_both"):
        other = resolve(checkpoint, load_format="dummy", ec_transfer_config={**PRODUCER, "ec_role": role})
        assert other.model.spec == whole.model.spec


@pytest.mark.parametrize(
    "options",
    [
        {"enable_lora": True},
        {"enable_prefix_caching": True},
        {"kv_offloading_size": 1.0},
        {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"pipeline_parallel_size": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_producer_refuses_what_needs_texts(checkpoint: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=f"{next(iter(options))}|pipeline_parallel_size"):
        resolved(checkpoint, **options)


def test_a_model_of_texts_has_no_embeddings_of_images(checkpoint: str) -> None:
    with pytest.raises(InvalidConfig, match="has no encoder of images"):
        resolved(checkpoint, language_model_only=True)
