"""What the start's log says of parts that no kernel computes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from configs import SPEC

from raycore.kernels import Backend
from raycore.models.spec import ClampedSwiglu, GateFunction, LayerGates, LimitedSilu, QueryScale
from raycore.parts.experts.models import ExpertChoice, MoeSpec
from raycore.worker.compute_backend import ComputeBackend

CORRECTED = MoeSpec(4, 2, 8, [True] * SPEC.num_layers, ExpertChoice(has_correction=True))


@pytest.mark.parametrize(
    ("operations_by", "attention_by", "parts", "expected"),
    [
        ("native", "native", {}, []),
        ("native", "torch", {}, ["attention"]),
        ("native", "native", {"attention_softcap": 2.0, "sinks": True}, []),
        ("native", "native", {"gate": "gelu_tanh", "qk_norm": "width"}, ["norms over all heads"]),
        ("native", "native", {"qk_norm": "own_heads", "norm": "layer"}, ["layer norms of heads"]),
        ("triton", "triton", {"norm": "bare_layer"}, ["layer norms"]),
        ("native", "native", {"dense": "xielu"}, ["activations (xIELU)"]),
        ("native", "native", {"moe": CORRECTED}, []),  # it computes all routers by torch
        ("triton", "triton", {"moe": CORRECTED}, []),
        ("native", "native", {"is_rotated_first": True}, ["rotations before norms"]),
        ("triton", "triton", {"query_scale": QueryScale(0.1, 8)}, ["scales of queries"]),
        ("triton", "triton", {"gate": ClampedSwiglu(1.7, 7.0)}, []),
        ("triton", "triton", {"gate": GateFunction("a.b"), "moe": CORRECTED}, ["gates (a.b)", "routers"]),
        ("native", "native", {"gate": GateFunction("a.b")}, ["gates (a.b)"]),
        ("native", "native", {"layer_gates": [LayerGates(LimitedSilu(7.0), "silu")]}, ["gates (SiLU with a limit)"]),
        ("torch", "torch", {"qk_norm": "width", "gate": GateFunction("a.b")}, []),
    ],
)
def test_the_parts_that_plain_torch_computes_are_listed(
    operations_by: Backend, attention_by: Backend, parts: dict[str, Any], expected: list[str]
) -> None:
    backend = ComputeBackend(operations_by, attention_by, torch.device("cpu"), False, torch.float32)
    assert backend.parts_by_torch(msgspec.structs.replace(SPEC, **parts)) == expected
