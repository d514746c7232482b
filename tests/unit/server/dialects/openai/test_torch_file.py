"""Files of torch.save() are read without torch, and nothing in them is executed."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from base64 import b64encode
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from raycore.errors import InvalidRequest
from raycore.server.dialects.openai.torch_file import read_tensor

TENSOR = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def read(data: bytes) -> Any:
    return read_tensor("it", b64encode(data).decode())


def changed(name: str, data: bytes, *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file of torch.save() with another content of one of its files."""
    file, source = io.BytesIO(), zipfile.ZipFile(io.BytesIO(saved(TENSOR)))
    with zipfile.ZipFile(file, "w", compression) as target:
        for each in source.namelist():
            target.writestr(each, data if each.endswith(name) else source.read(each))
    return file.getvalue()


@pytest.mark.parametrize(
    "tensor",
    [
        TENSOR,
        TENSOR.half(),
        TENSOR.bfloat16(),
        TENSOR.double(),
        TENSOR.t(),
        TENSOR[1:3, 2:],
        TENSOR[None],
        TENSOR.clone().requires_grad_(),
        torch.nn.Parameter(TENSOR),
    ],
)
def test_tensors_have_their_values(tensor: torch.Tensor) -> None:
    array = read(saved(tensor))
    assert np.array_equal(array, tensor.detach().to(torch.float64).numpy())
    assert array.shape == tuple(tensor.shape)


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


HUGE = 10**15


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        b"\x80\x02.",
        saved(TENSOR)[:-40],
        saved(TENSOR, _use_new_zipfile_serialization=False),
        saved({"a": TENSOR}),
        saved([TENSOR, TENSOR]),
        saved(TENSOR.long()),
        saved(torch.tensor(1.0)),
        saved(TENSOR.to_sparse()),
        saved(TENSOR[:1].expand(1000, 8)),
        saved(Harmful()),
        changed("data.pkl", pickle.dumps(Harmful())),
        changed("data.pkl", b"\x80\x02."),
        changed("data.pkl", b"\x80\x02K\x01r\xff\xff\xff\xff."),
        changed("data.pkl", b"\x80\x02" + b"(" * 3000),
        changed("data.pkl", b"\x80\x02t."),
        changed("data.pkl", b"x" * 5000),
        changed("data/0", b"\0" * 16),
        changed("data/0", b"\0" * 15),
        changed("byteorder", b"big"),
        changed("version", b"3\n", compression=zipfile.ZIP_DEFLATED),
        saved(TENSOR).replace(b"K\x05K\x08\x86", b"K\xffK\xff\x86"),
    ],
)
def test_everything_else_is_refused(data: bytes) -> None:
    with pytest.raises(
        InvalidRequest, match=r"it isn't the base64 of one tensor of floats, as torch.save\(\) writes it"
    ):
        read(data)


def test_texts_that_are_not_base64_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="it isn't the base64"):
        read_tensor("it", "no base64!")


def test_damaged_bytes_never_cause_another_error() -> None:
    good = saved(TENSOR)
    random = np.random.default_rng(0)
    for _ in range(400):
        data = bytearray(good)
        for index in random.integers(0, len(good), 3):
            data[index] = random.integers(0, 256)
        with suppress(InvalidRequest):
            assert read(bytes(data)).dtype.kind == "f"
