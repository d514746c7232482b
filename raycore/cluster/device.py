"""Resolves `device="auto"` when an engine starts. Looks at the GPUs of the engine's Ray cluster."""

from __future__ import annotations

import logging
from typing import Literal

from placement.topology import ClusterView

logger = logging.getLogger(__name__)


def choose_device(view: ClusterView) -> Literal["cpu", "cuda"]:
    """Return `cpu`, because raycore's GPU support is untested. Logs a warning if the cluster has GPUs."""
    num_gpus = sum(node.total.get("GPU", 0.0) for node in view.usable_nodes)
    if num_gpus:
        logger.warning(
            "device='auto' runs on CPUs, although the Ray cluster has %g GPUs: raycore's GPU support is untested. "
            "Pass device='cuda' (--device cuda) to use them, or device='cpu' to silence this warning.",
            num_gpus,
        )
    return "cpu"
