"""Tensors as clients of vLLM's servers read and write them."""

from __future__ import annotations

import base64
import io
import sys

import numpy as np
import pytest
import torch

from raycore.compat.tensors import (
    EMBED_DTYPES,
    ENDIANNESS,
    MetadataItem,
    binary2tensor,
    build_metadata_items,
    decode_pooling_output,
    tensor2base64,
    tensor2binary,
)
from raycore.errors import InvalidRequest
from raycore.parts.pooling.server.encoding import metadata

VALUES = torch.tensor([[1.0, -2.5], [0.25, 3.0]])


@pytest.mark.parametrize("endianness", ENDIANNESS)
@pytest.mark.parametrize("dtype", EMBED_DTYPES)
def test_tensors_come_back_from_bytes(dtype, endianness):
    data = tensor2binary(VALUES, dtype, endianness)
    assert len(data) == 4 * EMBED_DTYPES[dtype].itemsize
    assert torch.equal(binary2tensor(data, (2, 2), dtype, endianness).float(), VALUES.to(EMBED_DTYPES[dtype]).float())


def test_bytes_are_in_the_order_that_was_asked_for():
    big, little = (tensor2binary(torch.tensor([1.5]), "float32", order) for order in ("big", "little"))
    assert big == little[::-1] == b"\x3f\xc0\x00\x00"
    assert tensor2binary(torch.tensor([1.5]), "float32", "native") == (little if sys.byteorder == "little" else big)


def test_a_servers_bytes_are_read_by_its_metadata():
    results = [[1.0, 2.0], [3.0, 4.0]]
    body = tensor2binary(torch.tensor(results), "float16", "big")
    items = [
        MetadataItem(**{**each, "shape": tuple(each["shape"])})
        for each in metadata([np.array(each) for each in results], "float16", "big")
    ]
    assert items == build_metadata_items("float16", "big", (2,), 2)
    assert [each.tolist() for each in decode_pooling_output(reversed(items), body)] == results


def test_a_tensor_in_base64_is_what_torch_saves():
    assert torch.equal(torch.load(io.BytesIO(base64.b64decode(tensor2base64(VALUES)))), VALUES)


def test_unknown_names_are_errors():
    with pytest.raises(InvalidRequest, match="embed_dtype='int3' isn't one of float32"):
        tensor2binary(VALUES, "int3", "big")
    with pytest.raises(InvalidRequest, match="endianness='middle' isn't one of native"):
        binary2tensor(b"", (0,), "float32", "middle")  # pyright: ignore
