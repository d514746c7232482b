"""Which tensors a checkpoint's files hold, from the files' headers. Does not import torch.

A safetensors file begins with the length of its header, in 8 bytes, and the header: a JSON object with each tensor's
dtype, shape and offsets. A driver reads headers before it starts anything, so that a damaged file is found at once.
`raycore.checkpoint.gguf` reads those of GGUF files.
"""

from __future__ import annotations

__all__ = [
    "INDEX_FILE",
    "SINGLE_FILE",
    "WEIGHT_SUFFIXES",
    "has_weight_files",
    "listed",
    "read_header",
    "read_headers",
    "stored_tensors",
]

from collections.abc import Iterable
from pathlib import Path

import msgspec

from raycore.checkpoint.gguf.header import is_gguf, refuse_other_file
from raycore.checkpoint.gguf.tensors import gguf_tensors
from raycore.checkpoint.stored_tensor import StoredTensor
from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields, refuse_lfs_pointer

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20
"""The limit of the library safetensors."""
_MAX_NAMED = 4


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def has_weight_files(path: Path) -> bool:
    """Whether the directory `path` has weights in any format. That of a driver may have only the small files.

    `path` may be a GGUF file, which has weights if it exists.
    """
    if is_gguf(path):
        return path.is_file()
    return bool(_weight_files(path))  # the index is a small file, too


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the files of the checkpoint in the directory `path`, or in the GGUF file `path`, by name.

    Raises:
        InvalidCheckpoint: there are no safetensors files, one that the index lists is missing, or one is damaged.
        InvalidConfig: the package that reads a GGUF file isn't installed.
    """
    if is_gguf(path):
        return gguf_tensors(path)
    refuse_other_file(path, str(path))
    if not path.is_dir():
        raise InvalidCheckpoint(f"{path} isn't a directory: give the directory of a downloaded checkpoint")
    single, index = path / SINGLE_FILE, path / INDEX_FILE
    if single.exists():
        return read_header(single)
    if not index.exists():
        if (file := next((each for each in _weight_files(path) if is_gguf(path / each)), None)) is not None:
            raise InvalidCheckpoint(f"{path} has no safetensors files: give the path of a GGUF file, such as {file}")
        if others := [each for each in _weight_files(path) if not each.endswith(".safetensors")]:
            raise InvalidCheckpoint(
                f"{path} has its weights in {', '.join(others)} only, and raycore reads safetensors: download a "
                "version that has them, or convert it: transformers.AutoModelForCausalLM.from_pretrained(DIR)"
                ".save_pretrained(OTHER_DIR)"
            )
        raise InvalidCheckpoint(
            f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}: found "
            f"{', '.join(_weight_files(path)) or 'no weights at all'}. Download the rest of the checkpoint. Files that "
            "save_sharded_state() has written need load_format='sharded_state'"
        )
    fields = JsonFields.read(index)
    weight_map = {name: str(file) for name, file in fields.child("weight_map").values.items()}
    if not weight_map:
        raise fields.error("weight_map", "an object with the file of every tensor")
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise InvalidCheckpoint(
            f"{path} lacks {len(missing)} of the {len(files)} files that {INDEX_FILE} lists: {listed(missing)}. "
            "Download the rest of the checkpoint"
        )
    found = read_headers([path / file for file in files])
    for name, file in weight_map.items():
        if name not in found or found[name].file != path / file:
            raise InvalidCheckpoint(
                f"tensor {name} is missing from {path / file}, although {INDEX_FILE} lists it there: the index and the "
                "files are of different checkpoints"
            )
    return found


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return the tensors in some safetensors files, as `read_header`."""
    return {name: tensor for file in files for name, tensor in read_header(file).items()}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a safetensors file, by name.

    Raises:
        InvalidCheckpoint: it isn't one, or is damaged or incomplete.
    """
    try:
        with file.open("rb") as opened:
            start = opened.read(1024)
            refuse_lfs_pointer(file, start)
            num_bytes = file.stat().st_size
            length = int.from_bytes(start[:_LENGTH_BYTES], "little")
            if num_bytes < _LENGTH_BYTES:
                raise _damaged(file, f"it has {num_bytes} bytes")
            if length > min(num_bytes - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise _damaged(file, f"it has {num_bytes:,} bytes, which can't hold a header of {length:,}")
            opened.seek(_LENGTH_BYTES)
            header = opened.read(length)
    except OSError as error:
        raise InvalidCheckpoint(f"{file} can't be read: {error.strerror}") from error
    data_start = _LENGTH_BYTES + length
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        decoder = msgspec.json.Decoder(_Entry)
        found = {name: _stored(file, decoder.decode(entry), data_start) for name, entry in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(file, f"its header isn't that of a safetensors file: {error}") from error
    described = max([data_start, *(tensor.end for tensor in found.values())])
    if described != num_bytes:
        raise _damaged(file, f"it has {num_bytes:,} bytes, and its header describes {described:,}")
    return found


def listed(names: list[str]) -> str:
    """Return the first few of some names, and how many more there are."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _stored(file: Path, entry: _Entry, data_start: int) -> StoredTensor:
    start, end = entry.data_offsets
    return StoredTensor(file, entry.dtype, entry.shape, data_start + start, data_start + end)


def _damaged(file: Path, problem: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(
        f"{file} can't be read: {problem}. It is damaged or wasn't downloaded completely: download it again"
    )


def _weight_files(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("*") if file.suffix in WEIGHT_SUFFIXES)
