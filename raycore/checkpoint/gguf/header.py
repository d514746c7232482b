"""The header of a GGUF file: its metadata and where its tensors are, checked before anything relies on them.

Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` reads headers, too,
but trusts their numbers, and takes seconds for a vocabulary. Here every count, length and offset is compared with the
file's size before it is used, and long arrays are only skipped until somebody asks for them.
"""

from __future__ import annotations

__all__ = [
    "PART_NAME",
    "SUFFIX",
    "GgufFile",
    "GgufTensor",
    "LongArray",
    "is_gguf",
    "part_names",
    "read_gguf",
    "refuse_other_file",
    "shortest_float",
]

import math
import mmap
import os
import re
import struct
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from raycore.errors import InvalidCheckpoint, MissingPackage
from raycore.extras import is_installed, missing_package
from raycore.json_fields import refuse_lfs_pointer, shortened

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 256 << 20
"""Vocabularies of 300,000 tokens take 20 MB."""
_LEAST_ENTRY, _LEAST_TENSOR = 13, 32
"""Bytes of the shortest entry of the metadata, and of the shortest description of a tensor."""
_MAX_DIMENSIONS = 4
_MAX_NAME = 256
_LONG = 1024
"""Arrays with more elements are read when they are needed."""
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""By the number of a value's type: how `struct` and numpy write it."""
_U64, _F32 = struct.Struct("<Q"), struct.Struct("<f")
PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.ASCII | re.DOTALL | re.IGNORECASE)
"""Of a model in several files: what names share, the number of a file from 1 on, how many there are, the suffix."""


class _Type(NamedTuple):
    name: str
    num_numbers: int
    """Of a block: so many neighboring numbers of a row are stored together."""
    num_bytes: int
    """Of a block."""


_TYPES = {
    0: _Type("F32", 1, 4),
    1: _Type("F16", 1, 2),
    2: _Type("Q4_0", 32, 18),
    3: _Type("Q4_1", 32, 20),
    6: _Type("Q5_0", 32, 22),
    7: _Type("Q5_1", 32, 24),
    8: _Type("Q8_0", 32, 34),
    12: _Type("Q4_K", 256, 144),
    13: _Type("Q5_K", 256, 176),
    14: _Type("Q6_K", 256, 210),
    30: _Type("BF16", 1, 2),
}
"""By the number of a tensor's type, those that are read."""
BLOCKS = {each.name: (each.num_numbers, each.num_bytes) for each in _TYPES.values()}
"""By the name of a tensor's type: the numbers of a block, and its bytes."""
PLAIN = ("F32", "F16", "BF16")
"""Types whose numbers are stored one by one."""


class GgufTensor(NamedTuple):
    """A tensor in a GGUF file."""

    name: str
    file: Path
    type: str
    """A key of `BLOCKS`."""
    shape: tuple[int, ...]
    """As torch has it: neighboring numbers belong to the last dimension, which is whole blocks."""
    start: int
    """Of the tensor's bytes in the file."""
    end: int


class LongArray(NamedTuple):
    """An array in a file's metadata that hasn't been read."""

    file: Path
    key: str
    kind: int
    num_elements: int
    start: int

    def read(self) -> list[Any]:
        """Return the elements. Raises InvalidCheckpoint if a text isn't UTF-8."""
        with _mapped(self.file) as data:
            header = _Header(self.file, data)
            header.at = self.start
            return header.array(self.kind, self.num_elements, f"the metadata's {self.key}")


class GgufFile(NamedTuple):
    """A model in a GGUF file, or in several."""

    path: Path
    """The first file."""
    metadata: dict[str, Any]
    """Numbers, texts, lists, and `LongArray`s, by key."""
    tensors: dict[str, GgufTensor]
    """By name."""

    def array(self, key: str) -> list[Any] | None:
        """Return the list at `key` of the metadata. None if there is none."""
        value = self.metadata.get(key)
        if isinstance(value, LongArray):
            return value.read()
        if value is not None and not isinstance(value, list):
            raise InvalidCheckpoint(f"{self.path}: {key}={shortened(value)}: expected a list")
        return cast("list[Any] | None", value)


def is_gguf(path: Path) -> bool:
    """Whether `path` is the name of a GGUF file, rather than that of a directory."""
    return path.suffix.lower() == SUFFIX and not os.path.isdir(path)  # Path.is_dir() raises if the name is too long


def refuse_other_file(path: Path, what: str) -> None:
    """Raise InvalidCheckpoint if `path` is a file whose name isn't that of a GGUF file. Errors call it `what`."""
    if is_gguf(path) or not os.path.isfile(path):
        return
    try:
        with path.open("rb") as file:
            has_magic = file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise InvalidCheckpoint(f"{what} can't be read: {error.strerror}") from error
    if has_magic:
        raise InvalidCheckpoint(
            f"{what} is a GGUF file whose name doesn't end with {SUFFIX}: rename it, or give a link with such a name"
        )
    raise InvalidCheckpoint(f"{what} is a file: give a directory, or a GGUF file, whose name ends with {SUFFIX}")


def part_names(first: str) -> list[str]:
    """Return the names of all files of the model of which one, or the only one, has the name `first`."""
    found = PART_NAME.fullmatch(first)
    if found is None:
        return [first]
    return [f"{found[1]}-{number:05}-of-{found[3]}{found[4]}" for number in range(1, int(found[3]) + 1)]


def shortest_float(number: float) -> float:
    """Return the number with the fewest digits that a 32-bit float rounds to `number`: 1e-05, not 9.99999975e-06."""
    (wanted,) = _F32.unpack(_F32.pack(number))
    rounded = (float(f"{number:.{digits}g}") for digits in range(6, 10))
    return next((each for each in rounded if _F32.unpack(_F32.pack(each)) == (wanted,)), wanted)


def read_gguf(path: Path, max_header_bytes: int = _MAX_HEADER_BYTES) -> GgufFile:
    """Return the metadata and the tensors of the model in the file `path`, which may be the first one of several.

    A header that is larger than `max_header_bytes` counts as damaged.

    Raises:
        InvalidCheckpoint: a file is missing, damaged or incomplete, or has tensors of a type that isn't read. The
            message names the file and the value.
        InvalidConfig: the package that reads quantized tensors isn't installed.
    """
    whole = _parsed(path, max_header_bytes)
    parts = [(path, whole), *((part, _parsed(part, max_header_bytes)) for part in _other_parts(path, whole))]
    tensors: dict[str, GgufTensor] = {}
    for number, (part, file) in enumerate(parts):
        _check_part(part, file, number, len(parts))
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise InvalidCheckpoint(f"{part} has tensor {name}, which {tensors[name].file} has, too")
            tensors[name] = tensor
    expected = whole.metadata.get("split.tensors.count")
    if len(parts) > 1 and expected is not None and expected != len(tensors):
        raise InvalidCheckpoint(
            f"{path}: split.tensors.count={shortened(expected)}, but the {len(parts)} files have {len(tensors)} tensors"
        )
    _check_package(path, tensors)
    return GgufFile(path, whole.metadata, tensors)


def _check_package(path: Path, tensors: dict[str, GgufTensor]) -> None:
    quantized = next((each for each in tensors.values() if each.type not in PLAIN), None)
    if quantized is not None and not is_installed("gguf"):
        what = f"{path} has quantized tensors, such as {quantized.name} in {quantized.type}: reading them needs"
        raise MissingPackage(missing_package(what, "gguf", "gguf"))


def _other_parts(path: Path, file: GgufFile) -> list[Path]:
    """Return the other files of a model whose first file is `path`."""
    count = file.metadata.get("split.count", 0)
    named = PART_NAME.fullmatch(path.name)
    if count in (0, 1) and type(count) is int and (named is None or int(named[3]) == 1):
        return []
    if named is None or int(named[3]) != count or type(count) is not int:
        shown = f"split.count={shortened(count)}" if "split.count" in file.metadata else "no split.count"
        raise InvalidCheckpoint(
            f"{path} has {shown}: the files of a model in several parts are called NAME-00001-of-0000N.gguf, where N "
            "is split.count"
        )
    paths = [path.with_name(name) for name in part_names(path.name)]
    if int(named[2]) != 1:
        raise InvalidCheckpoint(f"{path} isn't the first of its model's {count} files: give {paths[0].name}")
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        raise InvalidCheckpoint(
            f"{path.parent} lacks {len(missing)} of the {count} files of {path.name}, the first of them {missing[0]}"
        )
    return paths[1:]


def _check_part(path: Path, file: GgufFile, number: int, count: int) -> None:
    if count == 1:
        return
    for key, expected in (("split.no", number), ("split.count", count)):
        if file.metadata.get(key) != expected:
            raise InvalidCheckpoint(f"{path}: {key}={shortened(file.metadata.get(key))}: expected {expected}")


def _parsed(path: Path, max_header_bytes: int) -> GgufFile:
    try:
        stat = path.stat()
    except OSError as error:
        raise InvalidCheckpoint(f"{path} can't be read: {error.strerror}") from error
    return _parse(path, max_header_bytes, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=16)
def _parse(path: Path, max_header_bytes: int, num_bytes: int, time_ns: int) -> GgufFile:
    """Parse one file. It isn't parsed again as long as it has the same size and time."""
    with _mapped(path) as data:
        return _Header(path, data, max_header_bytes).parse()


@contextmanager
def _mapped(path: Path) -> Generator[mmap.mmap | bytes]:
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                yield b""
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield data
    except OSError as error:
        raise InvalidCheckpoint(f"{path} can't be read: {error.strerror}") from error


class _Header:
    """Reads a header from its beginning to its end. `at` is where the next value begins."""

    def __init__(self, path: Path, data: mmap.mmap | bytes, max_bytes: int = _MAX_HEADER_BYTES) -> None:
        self._path = path
        self._data = data
        self._end = min(len(data), max_bytes)
        self.at = 0

    def parse(self) -> GgufFile:
        refuse_lfs_pointer(self._path, self._data[:64])
        if self._data[:4] != _MAGIC:
            raise self._damaged(f"it begins with {self._data[:4]!r}, and GGUF files with {_MAGIC!r}")
        self.at = 4
        version = self._number("I", "its version")
        if version not in _VERSIONS:
            big = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            kind = "a file of a machine with the other order of bytes" if big else f"version {version} of GGUF"
            raise InvalidCheckpoint(f"{self._path} is {kind}: raycore reads versions 2 and 3, in little-endian order")
        num_tensors = self._count("Q", "tensors", _LEAST_TENSOR)
        metadata = self._metadata(self._count("Q", "entries of metadata", _LEAST_ENTRY))
        found = [self._tensor() for _ in range(num_tensors)]
        return GgufFile(self._path, metadata, self._located(found, metadata))

    def array(self, kind: int, count: int, what: str) -> list[Any]:
        """Return the `count` elements of an array, which begins here."""
        if kind == _STRING:
            return [self._string(what) for _ in range(count)]
        numbers = struct.Struct(f"<{count}{_NUMBERS[kind]}")
        return list(numbers.unpack_from(self._data, self._advance(numbers.size, what)))

    def _metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number in range(count):
            key = self._name(f"the key of entry {number} of the metadata")
            if key in found:
                raise self._damaged(f"its metadata have {key} twice")
            found[key] = self._value(self._number("I", f"the type of {key}"), key)
        return found

    def _value(self, kind: int, key: str) -> Any:
        what = f"the metadata's {key}"
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            kind = self._number("I", what)
            least = 8 if kind == _STRING else struct.calcsize(_NUMBERS.get(kind, "B"))
            count = self._count("Q", f"elements of {key}", least)
            if kind != _STRING and kind not in _NUMBERS:
                raise self._damaged(f"{what} has elements of type {kind}: expected numbers or texts")
            if count <= _LONG:
                return self.array(kind, count, what)
            array = LongArray(self._path, key, kind, count, self.at)
            self._skip(kind, count, what)
            return array
        if kind not in _NUMBERS:
            raise self._damaged(f"{what} is of type {kind}, which GGUF doesn't have")
        value = self._number(_NUMBERS[kind], what)
        if isinstance(value, float) and not math.isfinite(value):
            raise self._damaged(f"{what} is {value}")
        return value

    def _tensor(self) -> tuple[str, _Type, tuple[int, ...], int]:
        """Return a tensor's name, type, shape, and where its bytes begin among those of all tensors."""
        name = self._name("the name of a tensor")
        num_dimensions = self._number("I", f"the dimensions of tensor {name}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {num_dimensions} dimensions: expected 1 to {_MAX_DIMENSIONS}")
        sizes = [self._number("Q", f"the shape of tensor {name}") for _ in range(num_dimensions)]
        type_number = self._number("I", f"the type of tensor {name}")
        offset = self._number("Q", f"the offset of tensor {name}")
        found = _TYPES.get(type_number)
        if found is None:
            raise InvalidCheckpoint(
                f"{self._path}: tensor {name} is stored as {_type_name(type_number)}: raycore reads "
                f"{', '.join(each.name for each in _TYPES.values())}"
            )
        if min(sizes) < 1 or sizes[0] % found.num_numbers:
            raise self._damaged(
                f"tensor {name} has the sizes {sizes}: expected positive ones, the first a multiple of "
                f"{found.num_numbers} for {found.name}"
            )
        return name, found, tuple(reversed(sizes)), offset

    def _located(
        self, found: list[tuple[str, _Type, tuple[int, ...], int]], metadata: dict[str, Any]
    ) -> dict[str, GgufTensor]:
        """Return the tensors by name, which are within the file and don't overlap."""
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            shown = shortened(alignment)
            raise self._damaged(f"general.alignment={shown}: expected a power of two, at most {_MAX_ALIGNMENT}")
        data_start, size = -(-self.at // alignment) * alignment, len(self._data)
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in found:
            if name in tensors:
                raise self._damaged(f"it has tensor {name} twice")
            start = data_start + offset
            end = start + math.prod(shape) // kind.num_numbers * kind.num_bytes
            if offset % alignment:
                raise self._damaged(f"tensor {name} has offset {offset}: expected a multiple of {alignment}")
            if end > size:
                raise self._damaged(f"tensor {name} of {kind.name}{list(shape)} ends at byte {end:,} of {size:,}")
            tensors[name] = GgufTensor(name, self._path, kind.name, shape, start, end)
        previous = None
        for tensor in sorted(tensors.values(), key=lambda each: each.start):
            if previous is not None and tensor.start < previous.end:
                raise self._damaged(
                    f"tensors {previous.name} and {tensor.name} overlap: they end at byte {previous.end:,} and begin "
                    f"at byte {tensor.start:,}"
                )
            previous = tensor
        return tensors

    def _count(self, code: str, what: str, least: int) -> int:
        """Return a number of things that follow, of which each takes at least `least` bytes."""
        count = self._number(code, f"the number of {what}")
        if count * least > self._end - self.at:
            raise self._damaged(
                f"it says that {count:,} {what} follow, which the {self._end - self.at:,} bytes left of its header "
                "can't hold"
            )
        return count

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack_from(f"<{code}", self._data, self._advance(struct.calcsize(f"<{code}"), what))[0]

    def _name(self, what: str) -> str:
        name = self._string(what)
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise self._damaged(f"{what} is {shortened(name)}: expected 1 to {_MAX_NAME} printable characters")
        return name

    def _string(self, what: str) -> str:
        length = _U64.unpack_from(self._data, self._advance(8, what))[0]
        start = self._advance(length, what)
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} isn't UTF-8: {error.reason} at byte {start + error.start:,}") from None

    def _skip(self, kind: int, count: int, what: str) -> None:
        if kind != _STRING:
            self._advance(count * struct.calcsize(_NUMBERS[kind]), what)
            return
        data, at, end, unpack = self._data, self.at, self._end, _U64.unpack_from
        for _ in range(count):
            if at + 8 > end:
                at = end + 1
                break
            at += 8 + unpack(data, at)[0]
        self._advance(at - self.at, what)

    def _advance(self, num_bytes: int, what: str) -> int:
        """Return where the next `num_bytes` begin, and go on after them."""
        start = self.at
        if num_bytes > self._end - start:
            end = f"the {self._end:,} bytes " + ("of the file" if self._end == len(self._data) else "a header may have")
            raise self._damaged(f"{what} takes {num_bytes:,} bytes from byte {start:,} on, more than {end}")
        self.at = start + num_bytes
        return start

    def _damaged(self, problem: str) -> InvalidCheckpoint:
        return InvalidCheckpoint(
            f"{self._path} can't be read: {problem}. It is damaged or wasn't downloaded completely: download it again"
        )


def _type_name(number: int) -> str:
    if not is_installed("gguf"):
        return f"type {number}"
    from gguf import GGMLQuantizationType  # imported lazily: only errors and quantized tensors need it

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return f"type {number}, which GGUF doesn't have"
