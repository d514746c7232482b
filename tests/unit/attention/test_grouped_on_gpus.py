"""Groups of layers with the kernels for GPUs, whose block tables are in the device's own memory."""

from __future__ import annotations

from interpreted_triton import DEVICE
from test_grouped import check_groups


def test_kernels_for_gpus_read_the_blocks_of_each_group() -> None:
    options = {"backend": "triton", "device": DEVICE, "batch_invariant": False, "is_shared": False}
    check_groups(options, (21, 5), num_spare=0, max_tokens=5)
