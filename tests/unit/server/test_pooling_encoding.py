"""Numbers as bytes are those of torch's types; as JSON they are exact."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from raycore.parts.pooling.server.encoding import as_bytes, as_json, packed_bits

TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def numbers() -> np.ndarray:
    """Of all sizes, those halfway between two values of small types, and those that no type has."""
    random = np.random.default_rng(0)
    sizes = random.normal(size=(8, 500)) * 10.0 ** np.arange(-6, 2)[:, None]
    halves = np.arange(-64, 64) / 32 + 1 / 64
    edges = [0.0, -0.0, 1.0, 447.9, 448.0, 464.0, 465.0, 57344.0, 61439.0, 61440.0, 65519.0, 65520.0, 1e30, -1e30]
    return np.concatenate([sizes.ravel(), halves, edges, [np.inf, -np.inf]]).astype(np.float32)


@pytest.mark.parametrize("dtype", TYPES)
def test_bytes_are_those_of_torch(dtype):
    data = numbers()
    expected = torch.from_numpy(data).to(TYPES[dtype]).view(torch.uint8).numpy()
    np.testing.assert_array_equal(np.frombuffer(as_bytes(data, dtype, "little"), np.uint8), expected)
    size = len(expected) // len(data)
    swapped = np.frombuffer(as_bytes(data, dtype, "big"), np.uint8).reshape(-1, size)[:, ::-1]
    np.testing.assert_array_equal(swapped.ravel(), expected)
    assert as_bytes(data, dtype, "native") == as_bytes(data, dtype, "little")


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_not_a_number_stays_so(dtype):
    stored = bytearray(as_bytes(np.array([np.nan], np.float32), dtype, "little"))
    assert torch.frombuffer(stored, dtype=torch.uint8).view(TYPES[dtype]).float().isnan().all()


def test_json_has_the_exact_numbers():
    data = numbers()[:-2].reshape(2, -1)
    np.testing.assert_array_equal(np.array(json.loads(bytes(as_json(data)))), data)
    assert json.loads(bytes(as_json(np.array([np.nan, np.inf], np.float32)))) == [None, None]


def test_eight_bits_are_packed_into_a_number():
    data = np.array([1, -1, 0, -0.5, 2, -3, 4, 5, -1, -1, -1, -1, -1, -1, -1, 1], np.float32)
    assert packed_bits(data, is_signed=False) == [0b10101011, 1]
    assert packed_bits(data, is_signed=True) == [0b10101011 - 128, -127]
