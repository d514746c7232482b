"""The encoders of images that config.json describes."""

from __future__ import annotations

from typing import Any

import pytest

from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields
from raycore.models.registry import parse_model_spec
from raycore.models.rotation import Rotation
from raycore.models.spec import ModelSpec
from raycore.parts.images.models import VisionSpec, without_vision

TEXT = {"hidden_size": 3584, "num_hidden_layers": 4, "num_attention_heads": 28, "num_key_value_heads": 4}
QWEN2_5: dict[str, Any] = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "text_config": TEXT,
    "vision_config": {"deepstack_visual_indexes": [1, 2]},
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {"hidden_size": 2560},
    "vision_config": {"image_size": 896, "patch_size": 14},
}


def parse(config: dict[str, Any]) -> ModelSpec:
    return parse_model_spec(JsonFields("config.json", config), JsonFields("generation_config.json", {}))


def vision_of(config: dict[str, Any]) -> VisionSpec:
    found = parse(config).vision
    assert found is not None
    return found


@pytest.mark.parametrize("config", [{**QWEN2_5, "text_config": TEXT}, {**QWEN2_5, **TEXT, "model_type": "qwen2_5_vl"}])
def test_qwen2_5_has_windows_and_three_positions(config: dict[str, Any]) -> None:
    spec = parse(config)
    vision = spec.vision
    assert vision is not None
    assert (vision.image_token_id, vision.start_token_id, vision.end_token_id) == (151655, 151652, 151653)
    assert (vision.window_size, vision.full_layers) == (4, [7, 15, 23, 31])
    assert spec.rotations[0] == Rotation(1e6, sections=(16, 24, 24))
    assert vision.num_tokens((1, 34, 46)) == 17 * 23
    assert vision.num_positions_of((1, 34, 46)) == 23
    assert vision.input_shape((1, 34, 46)) == (34 * 46, 3 * 2 * 14 * 14)


def test_qwen3_has_embeddings_of_several_layers() -> None:
    spec = parse(QWEN3)
    vision = spec.vision
    assert vision is not None
    assert vision.embedding_width == 3 * 3584
    rotation = spec.rotations[0]
    assert rotation is not None
    assert rotation.axes()[:7] == [0, 1, 2, 0, 1, 2, 0]
    assert rotation.axes()[56:] == [2, 0, 1, 2, 0, 0, 0, 0]


def test_stacked_experts_of_qwen3_have_a_row_for_each_input() -> None:
    text = {**TEXT, "num_local_experts": 8, "mlp_only_layers": [2]}
    config = {**QWEN3, "architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": text}
    spec = parse(config)
    assert spec.moe is not None
    assert (spec.moe.num_experts, spec.moe.num_experts_per_tok, spec.moe.is_transposed) == (8, 4, True)
    assert spec.moe.sparse_layers == [True, True, False, True]
    assert spec.moe.router.is_normalized
    assert spec.rotations[0] == parse(QWEN3).rotations[0]
    assert spec.vision == parse(QWEN3).vision
    with pytest.raises(InvalidCheckpoint, match="norm_topk_prob=False: expected true"):
        parse({**config, "text_config": {**text, "norm_topk_prob": False}})


def test_gemma3_has_as_many_tokens_for_every_image() -> None:
    vision = vision_of(GEMMA3)
    assert vision.is_bidirectional
    assert vision.num_tokens((1, 16, 16)) == vision.tokens_per_image == 256
    assert vision.patches_per_token == 16
    assert vision.input_shape((1, 16, 16)) == (3, 896, 896)


@pytest.mark.parametrize(
    ("config", "grid", "reason"),
    [
        (QWEN3, (1, 4, 6), None),
        (QWEN3, (1, 4, 5), "rows and columns have to be multiples of 2"),
        (QWEN3, (1, 0, 4), "at least one of each"),
        (GEMMA3, (1, 16, 16), None),
        (GEMMA3, (1, 16, 8), "every image has 256 embeddings"),
    ],
)
def test_impossible_grids_have_a_reason(config: dict[str, Any], grid: tuple[int, int, int], reason: str | None) -> None:
    found = vision_of(config).check_grid(grid)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (
            {**QWEN2_5, **TEXT, "vision_config": {"num_heads": 3}},
            "hidden_size=3584: expected a multiple of num_heads=3",
        ),
        ({**QWEN2_5, **TEXT, "vision_config": {"out_hidden_size": 64}}, "out_hidden_size=64: expected 3584"),
        ({**QWEN2_5, **TEXT, "vision_config": {"hidden_act": "tanh"}}, "hidden_act='tanh': expected one of silu"),
        ({**QWEN2_5, **TEXT, "vision_config": {"fullatt_block_indexes": [32]}}, "fullatt_block_indexes=[32]"),
        ({**QWEN2_5, **TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "mrope_section=[16, 24]"),
        ({**QWEN3, "vision_config": {"deepstack_visual_indexes": [1, 2, 3, 4]}}, "fewer layers than"),
        ({**QWEN3, "vision_config": {"num_position_embeddings": 35}}, "num_position_embeddings=35"),
        ({**GEMMA3, "mm_tokens_per_image": 225}, "mm_tokens_per_image=225: expected the square of a divisor of 64"),
        ({**GEMMA3, "vision_config": {"model_type": "clip"}}, "model_type='clip': expected siglip_vision_model"),
    ],
)
def test_settings_that_would_be_computed_wrongly_are_refused(config: dict[str, Any], part: str) -> None:
    with pytest.raises(InvalidCheckpoint) as refused:
        parse(config)
    assert part in str(refused.value)


def test_the_model_of_texts_alone_has_one_position() -> None:
    alone = without_vision(parse(QWEN3))
    assert alone.vision is None
    assert all(rotation == Rotation(500000.0, is_interleaved=True) for rotation in alone.rotations)
    assert without_vision(alone) is alone
