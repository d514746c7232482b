"""Options of models that see images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vision_checkpoints import QWEN3, make_vision_checkpoint

from raycore.config import resolve
from raycore.errors import InvalidConfig
from raycore.models.rotation import Rotation


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(QWEN3, tmp_path_factory.mktemp("vision"))


@pytest.mark.parametrize("options", [{"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0}}])
def test_the_model_of_texts_is_loaded_alone(qwen3: Path, options: dict[str, Any]) -> None:
    spec = resolve(qwen3, **options).model.spec
    assert spec.vision is None
    rotation = spec.rotations[0]
    assert isinstance(rotation, Rotation)
    assert rotation.sections == ()
    assert resolve(qwen3).model.spec.vision is not None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "a first stage of 2 layers"),
        ({"enable_prompt_embeds": True}, "load only its model of texts (language_model_only=True)"),
    ],
)
def test_what_images_cannot_be_used_with_is_refused(qwen3: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        resolve(qwen3, **options)
    assert reason in str(refused.value)
    resolve(qwen3, **options, language_model_only=True)
