"""The weights of a layer that predicts further tokens, divided among ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import MTP_FAMILIES, MtpCheckpoint

from raycore.checkpoint.model_spec import load_model_spec
from raycore.parts.drafts.checkpoint.mtp import mtp_spec
from raycore.parts.drafts.weights.mtp import load_mtp_weights, mtp_weight_bytes, random_mtp_weights
from raycore.weights.share import WeightShare


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_ranks_divide_the_layer_and_know_its_size(family: str, tmp_path: Path) -> None:
    path = MtpCheckpoint(family, tmp_path).path
    found = mtp_spec(load_model_spec(path))
    assert found is not None
    spec, head = found
    sizes: list[int] = []
    for tp_rank, tp_size in ((0, 1), (0, 2), (1, 2)):
        share = WeightShare(spec, torch.float32, tp_rank, tp_size)
        weights = load_mtp_weights(share, head, path)
        sizes.append(bytes_in(weights))
        assert sizes[-1] == bytes_in(random_mtp_weights(share, head))
        if tp_rank == 0:  # other ranks have fewer biases
            assert sizes[-1] == mtp_weight_bytes(share, head)
    assert sizes[0] / 2 < sizes[1] < sizes[0]
    assert sizes[2] <= sizes[1]


def bytes_in(weights: Any) -> int:
    if isinstance(weights, torch.Tensor):
        return weights.nbytes
    if isinstance(weights, list | tuple):
        return sum(map(bytes_in, weights))
    return sum(map(bytes_in, vars(weights).values())) if dataclasses.is_dataclass(weights) else 0
