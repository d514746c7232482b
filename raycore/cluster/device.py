"""Resolves `device="auto"` when an engine starts. Looks at the GPUs of the engine's Ray cluster, and at this torch."""

from __future__ import annotations

import logging
from typing import Literal

from placement.topology import ClusterView
from raycore.node.versions import cuda_of_torch, version_of

logger = logging.getLogger(__name__)

_KIND_OF_GPU = "accelerator_type:"
"""Prefix of a resource that Ray gives to nodes on which it has found a GPU. Other nodes with a resource `GPU` may only
have been told that they have some."""


def choose_device(view: ClusterView) -> Literal["cpu", "cuda"]:
    """Return `cuda` if the cluster has GPUs and torch is built for them, else `cpu`.

    Assumes that workers have the torch of this process. Logs a warning if GPUs of the cluster aren't used.
    """
    declared = [node.total for node in view.usable_nodes if node.total.get("GPU")]
    if not declared:
        return "cpu"
    if cuda_of_torch() is None:
        reason = f"torch {version_of('torch')} here is built without CUDA"
    elif not any(name.startswith(_KIND_OF_GPU) for total in declared for name in total):
        reason = "Ray has found no GPU driver on these nodes"
    else:
        return "cuda"
    logger.warning(
        "device='auto' runs on CPUs, although the Ray cluster has %g GPUs: %s. "
        "Pass device='cuda' (--device cuda) to use them, or device='cpu' to silence this warning.",
        sum(total["GPU"] for total in declared),
        reason,
    )
    return "cpu"
