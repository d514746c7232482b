"""Gemma 3n: streams of hidden states, as config.json describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_specs import spec_of

from raycore.errors import InvalidCheckpoint
from raycore.models.spec import ModelSpec
from raycore.models.streams import StreamsSpec

GEMMA3N = "Gemma3nForCausalLM"
CONFIG: dict[str, Any] = {"num_hidden_layers": 12, "num_kv_shared_layers": 4, "hidden_size": 64}


def parts_of(spec: ModelSpec) -> list[StreamsSpec]:
    return [each for each in spec.feed_forwards if isinstance(each, StreamsSpec)]


def test_layers_differ_in_their_sizes_and_in_how_sparse_their_gates_are(tmp_path: Path) -> None:
    parts = parts_of(spec_of(tmp_path, GEMMA3N, **CONFIG))
    # ten layers are sparse by default, if there are more
    assert [each.cutoff is not None for each in parts] == [True] * 10 + [False] * 2
    assert parts[0].cutoff == pytest.approx(1.6449, abs=1e-4)
    sizes = [*range(8, 20)]
    parts = parts_of(spec_of(tmp_path, GEMMA3N, **CONFIG | {"intermediate_size": sizes}))
    assert [each.intermediate_size for each in parts] == sizes


def test_rotations_are_read_in_both_forms(tmp_path: Path) -> None:
    old = {"rope_theta": 5e5, "rope_local_base_freq": 50.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    new = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    found = spec_of(tmp_path, GEMMA3N, **CONFIG | old).rotations
    assert found == spec_of(tmp_path, GEMMA3N, **CONFIG | {"rope_parameters": new}).rotations
    assert [None if each is None else each.theta for each in found] == [50.0, 50.0, 50.0, 50.0, 5e5] * 2 + [50.0] * 2
    plain = spec_of(tmp_path, GEMMA3N, **CONFIG).rotations
    assert [None if each is None else each.theta for each in plain[3:5]] == [1e4, 1e6]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"altup_num_inputs": 1}, "altup_num_inputs=1: expected an integer, at least 2"),
        ({"altup_active_idx": 4}, "altup_active_idx=4: expected less than altup_num_inputs=4"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern=.*: expected a list of 12 entries"),
        ({"activation_sparsity_pattern": [1.0] * 12}, "each from 0 to less than 1"),
        ({"intermediate_size": [8]}, r"intermediate_size=\[8\]: expected a positive integer, or 12"),
        ({"num_kv_shared_layers": 12}, "num_kv_shared_layers=12: expected so few"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=message):
        spec_of(tmp_path, GEMMA3N, **CONFIG | other)
