"""Rows of ids: those of the stages of a pipeline are joined, and layers without experts have zeros."""

from __future__ import annotations

import numpy as np
import pytest

from raycore.parts.routed_experts.models import ExpertRows


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_stages_are_joined_layer_after_layer(num_experts: int, dtype: type) -> None:
    rows = ExpertRows([False, True, True, False, True], num_experts, 2)
    assert (rows.width, rows.dtype) == (6, dtype)
    ids_TLK = np.random.default_rng(0).integers(0, num_experts, (4, 5, 2)).astype(dtype)
    ids_TLK[:, [0, 3]] = 0
    stages = [ids_TLK[:, [1, 2]].tobytes(), ids_TLK[:, [4]].tobytes()]
    joined = rows.joined(stages, 4)
    np.testing.assert_array_equal(rows.by_layer(bytearray(joined.tobytes())), ids_TLK)
    np.testing.assert_array_equal(rows.joined([joined.tobytes()], 4), joined)
