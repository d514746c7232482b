"""Reads a tensor from a file of torch.save(), without torch and without executing anything in the file.

The file is a zip archive: a pickle that describes the tensor, and the bytes of its values. The pickle is untrusted.
Only the operations are known that torch.save() writes for one tensor, and what they build are plain values.
"""

from __future__ import annotations

import pickletools
import struct
from base64 import b64decode
from io import BytesIO
from math import prod
from typing import Any, NamedTuple, cast
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from raycore.errors import InvalidRequest

_MAX_PICKLE_BYTES = 4096
_MAX_FILES = 32
_TYPES = {
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
    "torch DoubleStorage": "float64",
}
_REBUILD, _DICT, _PARAMETER = (
    "torch._utils _rebuild_tensor_v2",
    "collections OrderedDict",
    "torch._utils _rebuild_parameter",
)
_ERRORS = (
    BadZipFile,
    LookupError,
    ValueError,
    TypeError,
    ArithmeticError,
    EOFError,
    RuntimeError,
    MemoryError,
    struct.error,
)
"""What damaged archives and pickles cause."""
_MARK = object()


class _Storage(NamedTuple):
    dtype: str
    key: str
    num_values: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_tensor(where: str, text: str) -> NDArray[np.floating[Any]]:
    """Return the values of the tensor in a file.

    Args:
        where: what errors name.
        text: the base64 of the file.

    Raises:
        InvalidRequest: it isn't a file of one tensor of floats, as torch.save() has written them since torch 1.6.
    """
    try:
        return _read(b64decode(text, validate=True))
    except _ERRORS as error:
        raise InvalidRequest(
            f"{where} isn't the base64 of one tensor of floats, as torch.save() writes it: {str(error)[:200]}"
        ) from None


def _read(data: bytes) -> NDArray[np.floating[Any]]:
    with ZipFile(BytesIO(data)) as archive:
        files = {each.filename: each for each in archive.infolist()}
        if len(files) > _MAX_FILES or any(each.compress_type != ZIP_STORED for each in files.values()):
            raise ValueError("it isn't an archive as torch writes it")
        pickles = [name for name in files if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1 or files[pickles[0]].file_size > _MAX_PICKLE_BYTES:
            raise ValueError("it has no description of one tensor")
        root = pickles[0].removesuffix("data.pkl")
        order = archive.read(f"{root}byteorder") if f"{root}byteorder" in files else b"little"
        if order != b"little":
            raise ValueError(f"its byte order is {order[:16]!r}")
        tensor = _described(archive.read(pickles[0]))
        values = _values(tensor.storage, archive.read(f"{root}data/{tensor.storage.key}"))
    shape, strides = tensor.shape, tensor.strides
    if not shape or len(shape) != len(strides) or min(shape) < 1 or min(strides) < 0 or tensor.offset < 0:
        raise ValueError(f"its shape is {list(shape)}")
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if last >= len(values) or prod(shape) > len(values):
        raise ValueError(f"it has {len(values)} values for the shape {list(shape)}")
    size = values.itemsize
    view = np.lib.stride_tricks.as_strided(values[tensor.offset :], shape, [size * stride for stride in strides])
    return np.ascontiguousarray(view)


def _values(storage: _Storage, data: bytes) -> NDArray[np.floating[Any]]:
    if storage.dtype != "bfloat16":
        return np.frombuffer(data, storage.dtype)
    upper = np.frombuffer(data, np.uint16).astype(np.uint32) << np.uint32(16)
    return np.frombuffer(upper.tobytes(), np.float32)


def _described(data: bytes) -> _Tensor:
    """Return what a pickle describes. It is read, not executed."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for code, arg, _ in pickletools.genops(data):
        match code.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                break
            case "MARK":
                stack.append(_MARK)
            case "GLOBAL":
                stack.append(_named(cast("str", arg)))
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(arg)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(code.name == "NEWTRUE")
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(code.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "TUPLE":
                start = max(index for index, each in enumerate(stack) if each is _MARK)
                stack[start:] = [tuple(stack[start + 1 :])]
            case "BINPUT" | "LONG_BINPUT":
                memo[cast("int", arg)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[cast("int", arg)])
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                given = stack.pop()
                stack.append(_built(stack.pop(), given))
            case other:
                raise ValueError(f"its description has the operation {other}")
    if len(stack) != 1 or not isinstance(stack[0], _Tensor):
        raise ValueError("it describes something else")
    return stack[0]


def _named(name: str) -> str:
    if name not in (*_TYPES, _REBUILD, _PARAMETER, _DICT):
        raise ValueError(f"its description names {name[:64]!r}")
    return name


def _storage(given: Any) -> _Storage:
    kind, dtype, key, _, num_values = given
    if kind != "storage" or dtype not in _TYPES or not isinstance(key, str) or not isinstance(num_values, int):
        raise ValueError("its values aren't float16, bfloat16, float32 or float64")
    return _Storage(_TYPES[dtype], key, num_values)


def _built(called: Any, given: Any) -> Any:
    if called == _DICT and given == ():
        return {}
    if called == _PARAMETER and isinstance(given[0], _Tensor):
        return given[0]
    if called != _REBUILD or not isinstance(given[0], _Storage):
        raise ValueError("it describes something else")
    storage, offset, shape, strides = given[:4]
    numbers = (offset, *shape, *strides)
    if not isinstance(shape, tuple) or any(type(number) is not int for number in numbers):
        raise ValueError("its shape isn't made of integers")
    return _Tensor(storage, offset, cast("tuple[int, ...]", shape), tuple(strides))
