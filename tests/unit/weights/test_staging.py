"""Tensors reach a device in parts that fit into a buffer."""

from __future__ import annotations

import pytest
import torch

from raycore.weights.staging import Staging

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "starts"),
    [((5, 3), [0, 2, 4]), ((2, 3), [0]), ((3, 9), [0, 1, 2]), ((7,), [0, 6]), ((0, 3), []), ((3, 0), [])],
)
def test_staged_rows_are_sent_in_pieces_of_the_buffers_size(shape: tuple[int, ...], starts: list[int]) -> None:
    """A buffer has room for 6 numbers. A longer row gets a larger buffer."""
    source, out, seen = torch.randn(shape), torch.empty(shape), []

    def store(rows: slice, part: torch.Tensor) -> None:
        seen.append(rows.start)
        out[rows] = part

    Staging(CPU, buffer_bytes=24).send(source, store)
    assert seen == starts
    assert torch.equal(out, source)


def test_staged_columns_arrive_as_contiguous_rows() -> None:
    source = torch.arange(24).view(4, 6)[:, 1:3]
    parts: list[torch.Tensor] = []
    Staging(CPU, buffer_bytes=1 << 10).send(source, lambda rows, part: parts.append(part))
    assert parts[0].is_contiguous()
    assert torch.equal(parts[0], source)


def test_staging_alternates_between_two_buffers() -> None:
    """While the device reads one, the other is filled."""
    addresses: list[int] = []
    Staging(CPU, buffer_bytes=8).send(torch.arange(4), lambda rows, part: addresses.append(part.data_ptr()))
    assert addresses[0] != addresses[1]
    assert addresses == addresses[:2] * 2
