"""What config.json of Granite with experts means."""

from __future__ import annotations

from pathlib import Path

import msgspec
from model_specs import spec_of

from raycore.parts.experts.models import ExpertChoice, SharedExperts


def test_the_experts_of_granite_are_read(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "intermediate_size": 512, "num_local_experts": 16, "num_experts_per_tok": 4}
    alone = spec_of(tmp_path, "GraniteMoeForCausalLM", **sizes)
    assert alone.moe is not None
    assert (alone.moe.num_experts, alone.moe.num_experts_per_tok, alone.moe.intermediate_size) == (16, 4, 512)
    assert (alone.moe.router, alone.moe.shared) == (ExpertChoice("softmax_of_chosen"), None)
    beside = spec_of(tmp_path, "GraniteMoeSharedForCausalLM", **sizes, shared_intermediate_size=96)
    assert beside.moe == msgspec.structs.replace(
        alone.moe, shared=SharedExperts(96, size_key="shared_intermediate_size")
    )
    assert spec_of(tmp_path, "GraniteMoeSharedForCausalLM", **sizes, shared_intermediate_size=0).moe == alone.moe
    types = ["mamba", "attention"]
    hybrid = spec_of(tmp_path, "GraniteMoeHybridForCausalLM", **sizes, layer_types=types, shared_intermediate_size=96)
    assert (hybrid.moe, hybrid.state is None, hybrid.rotations) == (beside.moe, False, [None] * 2)
