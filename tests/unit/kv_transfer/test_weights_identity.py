"""Keys and values of other weights are never taken for those of an engine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from configs import make_config

from raycore.kv_transfer.identity import weights_identity


@pytest.mark.parametrize(
    ("model", "files"),
    [
        (".", ["config.json", "model.safetensors"]),
        ("m.gguf", ["m.gguf"]),
        ("m-00001-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
    ],
)
def test_each_file_of_a_model_counts(model: str, files: list[str], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"some")
    config = make_config()
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, model=str(tmp_path / model)))
    before = weights_identity(config)
    assert weights_identity(config) == before
    for name in files:
        (tmp_path / name).write_bytes(b"other")
        assert weights_identity(config) != before
        before = weights_identity(config)
