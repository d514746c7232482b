"""A start is refused if some workers have native kernels, and others lack them or have other ones."""

from __future__ import annotations

import msgspec
import pytest

from raycore.cluster.equal_kernels import Kernels, unequal_kernels
from raycore.messages import EngineInfo

HAS: Kernels = ("/a/raycore/kernels", True, "ab12")
UNKNOWN: Kernels = ("/c/raycore/kernels", True, "")
OTHER: Kernels = ("/d/raycore/kernels", True, "cd34")
LACKS: Kernels = ("/b/raycore/kernels", False, "")
UNUSED: Kernels = None


def infos(*ranks: list[Kernels]) -> list[EngineInfo]:
    """One rank for each list of its workers' kernels."""
    info = EngineInfo(0, 1, "", 8, 16, 128, "float32", {}, [])
    return [
        msgspec.structs.replace(info, dp_rank=dp_rank, node_id=f"node{dp_rank}", kernels=kernels)
        for dp_rank, kernels in enumerate(ranks)
    ]


@pytest.mark.parametrize(
    ("ranks", "driver"),
    [
        ([[HAS], [HAS]], HAS),
        ([[HAS], [UNKNOWN]], HAS),  # of an earlier build
        ([[HAS], [HAS]], OTHER),
        ([[HAS], [HAS]], LACKS),  # the driver computes nothing
        ([[LACKS], [LACKS]], LACKS),
        ([[LACKS], [UNUSED]], UNUSED),
        ([[HAS], [UNUSED]], HAS),
        ([[], []], HAS),  # on GPUs
    ],
)
def test_ranks_with_equal_kernels_start(ranks, driver):
    assert unequal_kernels(infos(*ranks), driver) is None


@pytest.mark.parametrize(
    ("ranks", "driver", "where", "who_has"),
    [
        ([[HAS], [LACKS]], LACKS, "dp_rank 1 on node node1", "dp_rank 0 on node node0"),
        ([[LACKS], [HAS]], UNUSED, "dp_rank 0 on node node0", "dp_rank 1 on node node1"),
        ([[HAS, LACKS]], UNUSED, "dp_rank 0 on node node0", "dp_rank 0 on node node0"),
        ([[LACKS], [LACKS]], HAS, "dp_rank 0 on node node0", "the driver"),
    ],
)
def test_kernels_missing_on_one_node_are_refused_with_both_nodes_and_folders(ranks, driver, where, who_has):
    told = unequal_kernels(infos(*ranks), driver)
    assert told is not None
    assert f"{where} finds none in /b/raycore/kernels" in told
    assert f"{who_has} has them in /a/raycore/kernels" in told
    assert "RAYCORE_CPU_KERNELS=none" in told


@pytest.mark.parametrize("ranks", [[[HAS], [OTHER]], [[HAS, UNKNOWN], [HAS, OTHER]]])
def test_kernels_of_other_sources_on_one_node_are_refused_with_both_nodes_and_folders(ranks):
    told = unequal_kernels(infos(*ranks), UNUSED)
    assert told is not None
    assert "has those of the sources ab12 in /a/raycore/kernels" in told
    assert "dp_rank 1 on node node1 has those of the sources cd34 in /d/raycore/kernels" in told
    assert "RAYCORE_CPU_KERNELS=none" in told
