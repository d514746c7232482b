"""What headers of safetensors files say, and what is said of files that are damaged or missing."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from raycore.checkpoint.weight_files import has_weight_files, read_header, stored_tensors
from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields
from raycore.text.tokenizer_files import read_tokenizer_files

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(5, np.float16), "c": np.float32([[7]])}


def write_in_two(path: Path) -> None:
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    for file in set(weight_map.values()):
        save_file({name: TENSORS[name] for name, own in weight_map.items() if own == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_tensors_are_located_by_the_headers_of_files(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file, {"format": "pt"})
    found = stored_tensors(tmp_path)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("F16", (5,)),
        "c": ("F32", (1, 1)),
    }
    content = file.read_bytes()
    for name, tensor in found.items():
        assert content[tensor.start : tensor.end] == TENSORS[name].tobytes()


def test_the_files_of_an_index_are_all_found(tmp_path: Path) -> None:
    assert not has_weight_files(tmp_path)
    write_in_two(tmp_path)
    assert has_weight_files(tmp_path)
    found = stored_tensors(tmp_path)
    assert {name: tensor.file.name for name, tensor in found.items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
        "c": "two.safetensors",
    }


def test_missing_files_are_listed(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="no weights at all"):
        stored_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(InvalidCheckpoint, match=r"has its weights in pytorch_model\.bin only"):
        stored_tensors(tmp_path)
    write_in_two(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"lacks 1 of the 2 files .*: two\.safetensors\. Download"):
        stored_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(InvalidCheckpoint, match=r"index\.json isn't valid JSON"):
        stored_tensors(tmp_path)


def test_an_index_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    write_in_two(tmp_path)
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    with pytest.raises(InvalidCheckpoint, match=r"tensor c is missing from .*two\.safetensors"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda content: b"", "it has 0 bytes"),
        (lambda content: content[:5], "it has 5 bytes"),
        (lambda content: content[:40], "which can't hold a header"),
        (lambda content: content[:-3], "its header describes"),
        (lambda content: content + b"1", "its header describes"),
        (lambda content: content.replace(b"dtype", b"d\xff\xfepe"), "isn't that of a safetensors file"),
        (lambda content: content.replace(b'"shape"', b'"share"'), "isn't that of a safetensors file"),
        (lambda content: content[:8] + b"[" * (len(content) - 8), "isn't that of a safetensors file"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage: Callable[[bytes], bytes], problem: str) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InvalidCheckpoint, match="download it again") as raised:
        read_header(file)
    assert str(file) in str(raised.value)
    assert problem in str(raised.value)


def test_a_git_lfs_pointer_instead_of_a_file_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(InvalidCheckpoint, match=r"Git LFS pointer.*git lfs pull"):
        read_header(file)
    for name in ("config.json", "tokenizer.json"):
        file.rename(tmp_path / name)
        file = tmp_path / name
        with pytest.raises(InvalidCheckpoint, match=rf"{name} is a Git LFS pointer"):
            read_tokenizer_files(tmp_path) if name == "tokenizer.json" else JsonFields.read(file)
    with pytest.raises(InvalidCheckpoint, match="can't be read"):
        read_header(tmp_path)
