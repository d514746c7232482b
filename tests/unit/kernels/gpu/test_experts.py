"""Routing and experts' results: Triton's kernels against plain torch and formulas in float64."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies
from interpreted_triton import DEVICE, DTYPES
from native_kernels import assert_near, randn

from raycore.kernels.gpu import experts
from raycore.layers.gate import gate_and_mul
from raycore.models.spec import ClampedSwiglu, Gate
from raycore.parts.experts.models import ExpertChoice

SEEDS = strategies.integers(0, 1 << 32)
NORMALIZED = ExpertChoice(is_normalized=True)
SETTINGS = hypothesis.settings(max_examples=25)


def chosen(
    router: ExpertChoice, per_token: int, logits_NE: torch.Tensor, correction_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and ids that a router says, in float64; of equal experts or groups, the first ones."""
    scores_NE = {"softmax": logits_NE.softmax(-1), "sigmoid": logits_NE.sigmoid()}.get(router.scores, logits_NE)
    choice_NE = scores_NE if correction_E is None else scores_NE + correction_E
    by_group_NGE = choice_NE.unflatten(1, (router.num_groups, -1))
    sums_NG = by_group_NGE.topk(min(router.num_compared, by_group_NGE.shape[2])).values.sum(-1)
    groups_NG = sums_NG.sort(dim=-1, descending=True, stable=True).indices[:, : router.num_chosen_groups]
    is_out_NG = torch.ones_like(sums_NG, dtype=torch.bool).scatter_(1, groups_NG, False)
    choice_NE = by_group_NGE.masked_fill(is_out_NG[..., None], -torch.inf).flatten(1)
    ids_NK = choice_NE.sort(dim=-1, descending=True, stable=True).indices[:, :per_token]
    weights_NK = scores_NE.gather(1, ids_NK)
    if router.scores == "softmax_of_chosen":
        weights_NK = weights_NK.softmax(-1)
    if router.is_normalized:
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    return weights_NK * router.scaling, ids_NK


@strategies.composite
def routers(draw: strategies.DrawFn) -> ExpertChoice:
    num_groups = draw(strategies.just(1) | strategies.integers(2, 6))
    return ExpertChoice(
        draw(strategies.sampled_from(["softmax", "softmax_of_chosen", "sigmoid"])),
        is_normalized=draw(strategies.booleans()),
        has_correction=draw(strategies.booleans()),
        num_groups=num_groups,
        num_chosen_groups=draw(strategies.integers(1, num_groups)),
        num_compared=draw(strategies.integers(1, 2)),
        scaling=draw(strategies.sampled_from([1.0, 2.5])),
    )


@hypothesis.settings(max_examples=50)
@hypothesis.given(
    dtype=strategies.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=SEEDS,
    num_tokens=strategies.integers(0, 4),
    group_size=strategies.integers(1, 40) | strategies.sampled_from([128, 1024]),
    per_token=strategies.integers(1, 9),
    router=routers(),
    has_ties=strategies.booleans(),
)
def test_routing_equals_a_stable_sort_of_the_softmax(
    dtype, seed: int, num_tokens: int, group_size: int, per_token: int, router: ExpertChoice, has_ties: bool
) -> None:
    num_experts, per_token = group_size * router.num_groups, min(per_token, group_size * router.num_chosen_groups)
    logits_NE = randn(seed, num_tokens, 2 * num_experts)[:, :num_experts]
    logits_NE = ((2 * logits_NE).round() / 2 if has_ties else logits_NE).to(dtype)
    correction_E = randn(seed + 1, num_experts).sign() if router.has_correction else None
    on_device = None if correction_E is None else correction_E.to(DEVICE)
    weights_NK, ids_NK = experts.route(logits_NE.to(DEVICE), per_token, router, torch.float32, on_device)
    expected_NK, expected_ids_NK = chosen(router, per_token, logits_NE.double(), correction_E)
    assert ids_NK.dtype == torch.int32
    assert ids_NK.tolist() == expected_ids_NK.tolist()
    assert_near(weights_NK.cpu(), expected_NK)


def test_routing_weights_are_rounded_to_the_dtype() -> None:
    logits_NE = randn(0, 5, 8).to(DEVICE)
    exact_NK, _ = experts.route(logits_NE, 3, NORMALIZED, torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        weights_NK, _ = experts.route(logits_NE, 3, NORMALIZED, dtype)
        assert weights_NK.dtype == dtype
        assert_near(weights_NK.cpu(), exact_NK.double().cpu(), 1.0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_tokens_with_nan_are_routed_to_experts_with_weights_of_nan() -> None:
    weights_NK, ids_NK = experts.route(torch.full((1, 6), torch.nan, device=DEVICE), 3, NORMALIZED, torch.float32)
    assert ids_NK.tolist() == [[0, 1, 2]]
    assert weights_NK.isnan().all()


class Layer:
    """A sparse layer's random weights, and its formula."""

    def __init__(
        self,
        seed: int,
        num_experts: int,
        dim: int,
        expert_dim: int,
        dtype: torch.dtype,
        gate: Gate = "silu",
        has_bias: bool = False,
    ) -> None:
        gate_up_EFD = randn(seed, num_experts, 2 * expert_dim, dim) / dim**0.5
        down_EDF = randn(seed + 1, num_experts, dim, expert_dim) / expert_dim**0.5
        self.gate_up_EFD, self.down_EDF = gate_up_EFD.to(dtype).to(DEVICE), down_EDF.to(dtype).to(DEVICE)
        self.gate: Gate = gate
        self.gate_up_bias_EF = randn(seed + 4, num_experts, 2 * expert_dim).to(dtype).to(DEVICE) if has_bias else None
        self.down_bias_ED = randn(seed + 5, num_experts, dim).to(dtype).to(DEVICE) if has_bias else None

    def apply(self, x_ND, weights_NK, ids_NK, first: int = 0, end: int | None = None, **options) -> torch.Tensor:
        own = slice(first, end)
        stacked = self.gate_up_EFD[own], self.down_EDF[own]
        biases = {"gate_up_bias_EF": self.gate_up_bias_EF, "down_bias_ED": self.down_bias_ED}
        options |= {name: None if bias is None else bias[own] for name, bias in biases.items()}
        return experts.apply_experts(x_ND, weights_NK, ids_NK, *stacked, first, gate=self.gate, **options)

    def expected(self, x_ND: torch.Tensor, weights_NK: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
        out_ND = torch.zeros_like(x_ND, dtype=torch.float64)
        for token, (weights, ids) in enumerate(zip(weights_NK.tolist(), ids_NK.tolist(), strict=True)):
            for weight, expert in zip(weights, ids, strict=True):
                gate_up = self.gate_up_EFD[expert].double() @ x_ND[token].double()
                if self.gate_up_bias_EF is not None:
                    gate_up += self.gate_up_bias_EF[expert]
                hidden = gate_and_mul(self.gate, gate_up.unsqueeze(0))[0].to(x_ND.dtype)
                result = self.down_EDF[expert].double() @ hidden.double()
                if self.down_bias_ED is not None:
                    result += self.down_bias_ED[expert]
                out_ND[token] += weight * result
        return out_ND


def routed(seed: int, num_tokens: int, num_experts: int, per_token: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights_NK, ids_NK = randn(seed, num_tokens, num_experts).softmax(-1).topk(per_token)
    return weights_NK.to(DEVICE), ids_NK.int().to(DEVICE)


def assert_close(found_ND: torch.Tensor, expected_ND: torch.Tensor) -> None:
    """A hidden number may be rounded to its other neighbor. This moves a result less than its own rounding does."""
    scale = max(1.0, float(expected_ND.abs().max())) if expected_ND.numel() else 1.0
    assert_near(found_ND.cpu(), expected_ND.cpu(), 2 * scale)


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    dtype=strategies.sampled_from(DTYPES),
    seed=SEEDS,
    num_tokens=strategies.integers(0, 9) | strategies.just(70),
    num_experts=strategies.integers(1, 6),
    per_token=strategies.integers(1, 4),
    dim=strategies.integers(1, 70),
    expert_dim=strategies.integers(1, 70),
    gate=strategies.sampled_from(["silu", "gelu", "gelu_tanh", "relu2", ClampedSwiglu(1.7, 0.5)]),
    has_bias=strategies.booleans(),
    batch_invariant=strategies.booleans(),
)
def test_the_experts_results_equal_the_formula(
    dtype,
    seed: int,
    num_tokens: int,
    num_experts: int,
    per_token: int,
    dim: int,
    expert_dim: int,
    gate: Gate,
    has_bias: bool,
    batch_invariant: bool,
) -> None:
    layer = Layer(seed, num_experts, dim, expert_dim, dtype, gate, has_bias)
    pairs = routed(seed + 2, num_tokens, num_experts, min(per_token, num_experts))
    x_ND = randn(seed + 3, num_tokens, 2 * dim).to(dtype).to(DEVICE)[:, :dim]
    found_ND = layer.apply(x_ND, *pairs, batch_invariant=batch_invariant)
    assert found_ND.dtype == dtype
    assert_close(found_ND, layer.expected(x_ND, *pairs))


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_the_experts_results_of_all_ranks_add_up_to_the_whole(num_tokens: int) -> None:
    layer, pairs = Layer(0, 7, 24, 40, torch.float32), routed(1, num_tokens, 7, 3)
    x_ND = randn(2, num_tokens, 24).to(DEVICE)
    parts = [layer.apply(x_ND, *pairs, first, end) for first, end in ((0, 1), (1, 5), (5, 7))]
    assert_close(sum(part.double() for part in parts).float(), layer.expected(x_ND, *pairs))
    weights_NK, ids_NK = pairs
    others_NK = torch.where(ids_NK < 5, 1000, ids_NK)  # none of the second rank's experts
    assert not layer.apply(x_ND, weights_NK, others_NK, 1, 5).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_experts_result_of_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    layer, (weights_NK, ids_NK) = Layer(0, 2, 40, 33, dtype), routed(1, 75, 2, 2)
    x_ND = randn(2, 75, 40).to(dtype).to(DEVICE)
    order = torch.randperm(75, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for batch_invariant in (False, True):
        found_ND = layer.apply(x_ND, weights_NK, ids_NK, batch_invariant=batch_invariant)
        moved_ND = layer.apply(x_ND[order], weights_NK[order], ids_NK[order], batch_invariant=batch_invariant)
        assert torch.equal(moved_ND, found_ND[order])
    for rows in (slice(70, 71), slice(3, 6)):
        alone_ND = layer.apply(x_ND[rows], weights_NK[rows], ids_NK[rows], batch_invariant=True)
        assert torch.equal(alone_ND, found_ND[rows])


@SETTINGS
@hypothesis.given(
    seed=SEEDS, num_pairs=strategies.integers(1, 30) | strategies.just(5000), num_own=strategies.integers(1, 5)
)
def test_pairs_of_tokens_and_experts_are_grouped_by_expert_in_order(seed: int, num_pairs: int, num_own: int) -> None:
    ids_NK = torch.randint(8, (num_pairs, 1), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    groups = experts._group(ids_NK.to(DEVICE), num_own, 2)
    counts = groups.counts_E.tolist()
    assert groups.starts_E.tolist() == [sum(counts[:i]) for i in range(num_own)]
    own = [(expert, pair) for pair, [expert] in enumerate(ids_NK.tolist()) if 2 <= expert < 2 + num_own]
    assert counts == [sum(expert == 2 + i for expert, _ in own) for i in range(num_own)]
    assert groups.pairs_P.tolist()[: len(own)] == [pair for _, pair in sorted(own)]
