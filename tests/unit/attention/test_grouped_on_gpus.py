"""Groups of layers with the kernels for GPUs, whose block tables are in the device's own memory."""

from __future__ import annotations

import interpreted_triton
import pytest
from test_grouped import check_groups


@pytest.mark.skipif(interpreted_triton.DEVICE.type != "cpu", reason="the test's tensors are on the CPU")
def test_kernels_for_gpus_read_the_blocks_of_each_group() -> None:
    check_groups(
        {"backend": "triton", "batch_invariant": False, "is_shared": False}, (21, 5), num_spare=0, max_tokens=5
    )
