"""The short forms of norms, rotations and linear layers equal the long ones."""

from __future__ import annotations

import math

import pytest
import torch
from small_model import CPU

from raycore.layers.gate import gate_and_mul
from raycore.layers.linear import PackedLinear, PlainLinear, can_pack, make_linear
from raycore.layers.norm import OwnHeadNorm, RMSNorm
from raycore.layers.rope import PairOrder, Rope, rotate_
from raycore.models.rotation import RopeScaling, Rotation


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm_is_the_formula(scale: float) -> None:
    x, weight = torch.randn(5, 3, 16) * scale, torch.randn(16)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    norm = RMSNorm(weight, 1e-6)
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-6)
    norm.apply_(x)
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not RMSNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)).any()


def test_rms_norm_in_bfloat16_computes_in_float32() -> None:
    x, weight = torch.randn(4, 64).bfloat16(), torch.rand(64).bfloat16()
    expected = RMSNorm(weight.float(), 1e-6)(x.float())
    torch.testing.assert_close(RMSNorm(weight, 1e-6)(x).float(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_offset_of_a_norms_weight_is_added_in_float32(batch_invariant: bool) -> None:
    x, weight = torch.randn(4, 64).bfloat16(), (torch.rand(64) / 256).bfloat16()
    expected = RMSNorm(weight.float() + 1.0, 1e-6)(x.float()).bfloat16()
    found = RMSNorm(weight, 1e-6, batch_invariant, offset=1.0)(x)
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=0)
    # in bfloat16, 1 plus these weights is 1
    assert not torch.equal(found, RMSNorm(torch.ones(64), 1e-6)(x.float()).bfloat16())


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norms_of_heads_have_weights_of_their_own(batch_invariant: bool, dtype: torch.dtype) -> None:
    qkv, weight = torch.randn(5, 7 * 8).to(dtype), torch.randn(4, 8)
    expected = qkv.clone()
    for head in range(4):
        own = qkv[:, 8 * head : 8 * head + 8].float()
        expected[:, 8 * head : 8 * head + 8] = torch.nn.functional.layer_norm(own, (8,), weight[head], None, 1e-3)
    OwnHeadNorm(weight, 1e-3, batch_invariant=batch_invariant).apply_(qkv)
    torch.testing.assert_close(qkv, expected)


def linears(weight: torch.Tensor, bias: torch.Tensor | None) -> list[PlainLinear | PackedLinear]:
    kinds: list[PlainLinear | PackedLinear] = [PlainLinear(weight, bias)]
    return [*kinds, PackedLinear(weight, bias)] if can_pack(weight.dtype) else kinds


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_all_linear_layers_equal_torchs_linear(num_rows: int, has_bias: bool) -> None:
    weight, x, residual = torch.randn(48, 32), torch.randn(num_rows, 32), torch.randn(num_rows, 48)
    bias = torch.randn(48) if has_bias else None
    expected = torch.nn.functional.linear(x, weight, bias)
    for linear in linears(weight, bias):
        torch.testing.assert_close(linear(x), expected)
        torch.testing.assert_close(linear.add_to(residual.clone(), x), residual + expected)


def test_small_float32_weights_stay_plain() -> None:
    assert isinstance(make_linear(torch.zeros(8, 8)), PlainLinear)


def test_silu_and_mul_takes_gate_then_up() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(gate_and_mul("silu", torch.cat([gate, up], 1)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_of_interleaved_heads_equals_that_of_halves(dtype: torch.dtype) -> None:
    heads_TNH, positions = torch.randn(6, 3, 8).to(dtype), torch.tensor([0, 1, 5, 5, 40, 95])
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads_TNH.float().chunk(2, -1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    rotation = Rotation(10000.0)
    order = PairOrder(rotation, 8)
    turned = order.pairs(heads_TNH.transpose(0, 1).transpose(1, 2)).permute(2, 0, 1).contiguous()
    rotate_(turned, Rope(rotation, 8, 96, CPU).turns(positions))
    expected = order.pairs(expected.transpose(0, 1).transpose(1, 2)).permute(2, 0, 1)
    torch.testing.assert_close(turned.float(), expected, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-2)


def test_rope_scalings_at_the_ends_of_the_spectrum() -> None:
    """Llama 3 and YaRN keep the fastest turn and slow the slowest down by the factor; linear slows all down."""

    def angles(scaling: RopeScaling | None) -> torch.Tensor:
        return Rope(Rotation(500000.0, scaling), 64, 2, CPU).turns(torch.tensor([1]))[0, 0].angle()

    plain = angles(None)
    torch.testing.assert_close(angles(RopeScaling("linear", 4.0)), plain / 4)
    for rope_type in ("llama3", "yarn"):
        scaled = angles(RopeScaling(rope_type, 8.0, original_max_position_embeddings=8192))
        assert float(scaled[0]) == pytest.approx(float(plain[0]))
        assert float(scaled[-1]) == pytest.approx(float(plain[-1]) / 8)
        assert (scaled <= plain * (1 + 1e-6)).all()


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("is_adjacent", [False, True])
def test_pairs_are_rotated_and_the_rest_stays(fraction: float, is_adjacent: bool) -> None:
    rotation, head_dim = Rotation(100.0, fraction=fraction, is_adjacent=is_adjacent), 8
    order, x_H, position = PairOrder(rotation, head_dim), torch.randn(head_dim), 3
    num_rotated = int(head_dim * fraction)
    expected_H = x_H.clone()
    for pair in range(num_rotated // 2):
        first, second = (2 * pair, 2 * pair + 1) if is_adjacent else (pair, pair + num_rotated // 2)
        turn = torch.polar(torch.ones(()), torch.tensor(position * 100.0 ** (-2 * pair / num_rotated)))
        turned = torch.complex(x_H[first], x_H[second]) * turn
        expected_H[first], expected_H[second] = turned.real, turned.imag
    heads_11H = order.pairs(x_H[None]).view(1, 1, -1)
    rotate_(heads_11H, Rope(rotation, head_dim, 5, CPU).turns(torch.tensor([position])))
    torch.testing.assert_close(order.stored(heads_11H[0])[0], expected_H)


@pytest.mark.parametrize(("max_length", "factors"), [(24, (1.0, 2.0)), (25, (4.0, 8.0))])
def test_long_rope_has_long_factors_if_the_maximum_length_exceeds_the_original_one(
    max_length: int, factors: tuple[float, ...]
) -> None:
    scaling = RopeScaling("longrope", 2.0, 24, attention_factor=1.25, short_factors=(1.0, 2.0), long_factors=(4.0, 8.0))
    turns = Rope(Rotation(100.0, scaling), 4, max_length, CPU).turns(torch.tensor([1]))[0, 0]
    torch.testing.assert_close(turns.angle(), torch.tensor([1.0, 0.1]) / torch.tensor(factors))
    torch.testing.assert_close(turns.abs(), torch.full((2,), 1.25))


def test_yarn_lengthens_the_vectors() -> None:
    scaling = RopeScaling("yarn", 4.0, original_max_position_embeddings=24, attention_factor=1.25)
    turns = Rope(Rotation(10000.0, scaling), 8, 4, CPU).turns(torch.arange(4))
    torch.testing.assert_close(turns.abs(), torch.full_like(turns.abs(), 1.25))
    assert math.isclose(float(turns[0, 0, 0].real), 1.25)
