"""What happens to queries and keys before attention: they grow with their position, and are rotated before norms."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from configs import SPEC
from torch import Tensor

from raycore.attention.prepared import PreparedAttention
from raycore.attention.spec import AttentionSpec, MixerConstants
from raycore.models.rotation import Rotation
from raycore.models.spec import ModelSpec, QueryScale
from raycore.step.device_batch import StepTensors

CPU = torch.device("cpu")
ROTATIONS: list[Rotation | None] = [Rotation(10000.0), Rotation(100.0)]
GROWING = msgspec.structs.replace(SPEC, query_scale=QueryScale(0.5, 4))
ROTATED = msgspec.structs.replace(SPEC, qk_norm="heads", is_rotated_first=True, rotations=ROTATIONS)
POSITIONS = [0, 3, 4, 19]


class _Noting:
    """Attention that notes its inputs."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []

    def begin(self, step: object, tensors: StepTensors) -> None: ...

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        self.inputs.append(qkv_TO.clone())
        return qkv_TO


def spec_of(model: ModelSpec) -> AttentionSpec:
    return AttentionSpec.of(model, 1, [MixerConstants()] * 2, 32, torch.float32, CPU)


def prepared(model: ModelSpec, qkv_TO: Tensor, positions: list[int]) -> list[Tensor]:
    """What the attention of both layers gets."""
    noting = _Noting()
    attention = PreparedAttention(noting, spec_of(model))
    tensors = StepTensors(*[torch.empty(0)] * 2, torch.tensor(positions), *[torch.empty(0)] * 3)
    attention.begin(None, tensors)  # pyright: ignore[reportArgumentType]
    for layer in range(2):
        attention(layer, qkv_TO.clone())
    return noting.inputs


def test_only_queries_are_scaled_by_their_position() -> None:
    qkv_TO = torch.randn(4, 64)
    for found_TO in prepared(GROWING, qkv_TO, POSITIONS):
        factors = [1.0, 1.0, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(5)]
        torch.testing.assert_close(found_TO[:, :32], qkv_TO[:, :32] * torch.tensor(factors)[:, None])
        assert torch.equal(found_TO[:, 32:], qkv_TO[:, 32:])


def test_heads_are_rotated_once_by_their_layers_rotation() -> None:
    spec = spec_of(ROTATED)
    assert all(torch.equal(rope.cosines_and_sines()[:, 0::2], torch.ones(33, 4)) for rope in spec.ropes)
    qkv_TO = torch.randn(4, 64)
    for rotation, found_TO in zip(ROTATIONS, prepared(ROTATED, qkv_TO, POSITIONS), strict=True):
        assert rotation is not None
        frequencies_C = rotation.theta ** -(torch.arange(0, 8, 2) / 8)
        angles_TC = torch.tensor(POSITIONS)[:, None] * frequencies_C
        pairs_TNC = torch.view_as_complex(qkv_TO.view(4, 8, 4, 2))
        rotated_TNC = pairs_TNC * torch.polar(torch.ones(4, 4), angles_TC)[:, None]
        expected_TO = torch.view_as_real(rotated_TNC).reshape(4, 64)
        torch.testing.assert_close(found_TO[:, :48], expected_TO[:, :48])
        assert torch.equal(found_TO[:, 48:], qkv_TO[:, 48:])


def test_layers_that_run_again_without_begin_read_the_present_positions() -> None:
    """As a captured graph does, which doesn't begin the step."""
    noting = _Noting()
    attention = PreparedAttention(noting, spec_of(GROWING))
    positions_T = torch.tensor([0, 0])
    tensors = StepTensors(*[torch.empty(0)] * 2, positions_T, *[torch.empty(0)] * 3)
    attention.begin(None, tensors)  # pyright: ignore[reportArgumentType]
    for position in (0, 19):
        positions_T.fill_(position)
        for layer in range(2):
            attention(layer, torch.ones(2, 64))
    factors = [float(found_TO[1, 0]) for found_TO in noting.inputs]
    assert factors == pytest.approx([1.0, 1.0, *[1 + 0.5 * math.log(5)] * 2])


@pytest.mark.parametrize(("model", "is_prepared"), [(SPEC, False), (GROWING, True), (ROTATED, True)])
def test_plain_torch_prepares_heads_only_for_models_that_need_it(model: ModelSpec, is_prepared: bool) -> None:
    assert spec_of(model).is_prepared == is_prepared
