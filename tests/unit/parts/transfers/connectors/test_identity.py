"""The identity of what an engine computes: another one whenever anything differs that results depend on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from configs import make_config
from numpy.typing import NDArray
from safetensors.numpy import save_file

from raycore.config import EngineConfig
from raycore.parts.transfers.config.kv_transfer import KVTransferConfig
from raycore.parts.transfers.connectors.identity import Identity, files_identity


def config_of(path: Path, **model: Any) -> EngineConfig:
    config = make_config()
    model = {"model": str(path), "load_format": "auto", **model}
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, **model),
        kv_transfer_config=KVTransferConfig("OffloadConnector"),
    )


@pytest.mark.parametrize(
    ("model", "files"),
    [
        (".", ["config.json", "model.safetensors", "own_code.py", "preprocessor_config.json"]),
        ("m.gguf", ["m.gguf"]),
        ("m-00001-of-00002.gguf", ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
    ],
)
def test_each_file_of_a_model_counts(model: str, files: list[str], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"some")
    config = config_of(tmp_path / model)
    before = files_identity(config)
    assert files_identity(config) == before
    for name in files:
        (tmp_path / name).write_bytes(b"other")
        assert files_identity(config) != before
        before = files_identity(config)


def test_other_numbers_count_in_a_file_of_the_same_name_size_and_time(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1" * 100_000)
    os.utime(file, (5, 5))
    before = files_identity(config_of(tmp_path))
    file.write_bytes(b"2" * 100_000)
    os.utime(file, (5, 5))
    assert files_identity(config_of(tmp_path)) != before


def written(path: Path, tensors: dict[str, NDArray[np.float32]]) -> bytes | None:
    """Write the tensors as a model into a new directory, and return its identity."""
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    return files_identity(config_of(path))


def test_copies_have_the_same_identity_wherever_and_however_old_they_are(tmp_path: Path) -> None:
    tensors = {"a": np.arange(9000, dtype=np.float32)}
    before = written(tmp_path / "one", tensors)
    shutil.copytree(tmp_path / "one", tmp_path / "two", copy_function=shutil.copyfile)
    os.utime(tmp_path / "two" / "model.safetensors", (5, 5))
    assert files_identity(config_of(tmp_path / "two")) == before
    (tmp_path / "two" / "model.safetensors").rename(tmp_path / "two" / "other.safetensors")
    assert files_identity(config_of(tmp_path / "two")) != before


@pytest.mark.parametrize("place", [0, -1], ids=["begin", "end"])
@pytest.mark.parametrize("changed", ["short", "long", "longest"])
def test_each_tensor_counts(changed: str, place: int, tmp_path: Path) -> None:
    """Also one between others that are so long that few samples are left for it."""
    sizes = {"short": 3, "long": 3000, "longest": 9_000_000}
    tensors = {f"{side}.{name}": np.zeros(size, np.float32) for side in "ab" for name, size in sizes.items()}
    before = written(tmp_path / "before", tensors)
    tensors[f"a.{changed}"][place] = 1
    assert written(tmp_path / "after", tensors) != before


OPTIONS: list[dict[str, Any]] = [
    {"load_format": "dummy"},
    {"load_format": "dummy", "seed": 7},
    {"quantization": "int8"},
    {"cpu_activation_dtype": "int8"},
    {"hf_overrides": {"rope_theta": 5.0}},
    {"model_impl": "transformers"},
    {"model_loader_extra_config": {"pattern": "x"}},
]


def test_each_option_counts_that_weights_or_the_models_code_depend_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "described").mkdir()
    (tmp_path / "described" / "config.json").write_text("{}")
    options = [{}, *OPTIONS, {"hf_config_path": str(tmp_path / "described")}]
    assert len({files_identity(config_of(tmp_path, **each)) for each in options}) == len(options)
    before = files_identity(config_of(tmp_path, **options[-1]))
    (tmp_path / "described" / "config.json").write_text("{ }")
    assert files_identity(config_of(tmp_path, **options[-1])) != before


def test_files_that_change_while_they_are_read_give_an_identity_that_nobody_else_has(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    found: list[bytes] = []
    for reader in (Identity(config_of(tmp_path)), Identity(config_of(tmp_path))):
        with reader.reading():
            pass
        found.append(reader.digest)
    assert found[0] == found[1]
    identity = Identity(config_of(tmp_path))
    with identity.reading():
        file.write_bytes(b"12")
    assert identity.digest not in found
    with pytest.raises(ZeroDivisionError), identity.reading():
        raise ZeroDivisionError


def test_files_that_are_not_on_this_node_are_known_to_nobody(tmp_path: Path) -> None:
    assert files_identity(config_of(tmp_path / "nowhere")) is None
    with Identity(config_of(tmp_path / "nowhere")).reading():
        pass  # whoever reads them says what is missing


def test_keys_of_an_engines_ranks_are_equal_and_all_others_differ(tmp_path: Path) -> None:
    first, second = Identity(config_of(tmp_path)), Identity(config_of(tmp_path))
    assert first.digest != second.digest
    first.adopt("a")
    second.adopt("a")
    assert first.digest == second.digest
    first.lose()
    second.lose()
    assert first.digest != second.digest
