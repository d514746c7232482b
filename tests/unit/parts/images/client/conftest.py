from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from raycore.config import resolve
from raycore.parts.images.client.inputs import ImageInputs
from raycore.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """A function that returns the directory of a checkpoint of one kind."""
    from vision_checkpoints import make_vision_checkpoint

    @cache
    def made(kind: str) -> Path:
        return make_vision_checkpoint(kind, tmp_path_factory.mktemp(kind))

    return made


@pytest.fixture
def inputs(checkpoint):
    """A function that returns what makes prompts for a checkpoint of one kind."""

    def made(kind: str, **options: Any) -> ImageInputs:
        path = checkpoint(kind)
        return ImageInputs(resolve(str(path), **options), Tokenizer.from_dir(path))

    return made
