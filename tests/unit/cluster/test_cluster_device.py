"""`device="auto"` takes GPUs that can be used, and says why it doesn't take others."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from placement.topology import ClusterView, NodeView
from raycore.cluster import device
from raycore.cluster.device import choose_device
from raycore.node.versions import cuda_of_torch


def view(*resources: dict[str, float]) -> ClusterView:
    return ClusterView(tuple(NodeView(f"node{i}", f"10.0.0.{i}", each, each) for i, each in enumerate(resources)))


HEAD = {"CPU": 2.0}
H100 = {"CPU": 8.0, "GPU": 4.0, "accelerator_type:H100": 1.0}
DECLARED = {"CPU": 8.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("nodes", "cuda", "expected", "warning"),
    [
        ([HEAD, H100], "13.0", "cuda", None),
        ([HEAD], "13.0", "cpu", None),
        ([HEAD], None, "cpu", None),
        ([HEAD, H100, H100], None, "cpu", f"has 8 GPUs: torch {torch.__version__} here is built without CUDA."),
        ([HEAD, DECLARED], "13.0", "cpu", "has 2 GPUs: Ray has found no GPU driver on these nodes."),
    ],
    ids=["gpus", "no gpus", "neither", "torch without CUDA", "gpus that are only declared"],
)
def test_device_auto_takes_the_clusters_gpus_and_warns_if_they_cannot_be_used(
    nodes: list[dict[str, float]],
    cuda: str | None,
    expected: str,
    warning: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(device, "cuda_of_torch", lambda: cuda)
    with caplog.at_level(logging.DEBUG):
        assert choose_device(view(*nodes)) == expected
    found = [re.search(r"has .* GPUs: .*?\.(?= Pass)", message) for message in caplog.messages]
    assert [match.group() for match in found if match] == ([] if warning is None else [warning])
    assert len(found) == (warning is not None)


def test_torchs_cuda_version_is_read_without_importing_torch():
    assert cuda_of_torch() == torch.version.cuda
