"""Each token gets the experts, with the weights, that a loop over tokens and groups finds."""

from __future__ import annotations

import interpreted_triton  # noqa: F401  # before whatever imports Triton
import pytest
import torch
from small_model import make_operations

from raycore.kernels import library as kernels
from raycore.parts.experts.layers.router import TorchRouter
from raycore.parts.experts.models import ExpertChoice, MoeSpec
from raycore.parts.experts.weights import MoeWeights

HIDDEN, EXPERTS, PER_TOKEN = 16, 12, 3
GENERATOR = torch.Generator().manual_seed(2)
ROUTER_ED = torch.randn(EXPERTS, HIDDEN, generator=GENERATOR)
CORRECTION_E = torch.randn(EXPERTS, generator=GENERATOR)
NOTHING = torch.empty(0, 0, 0)
BACKENDS = ["torch", "native" if kernels.load() is not None else "torch", "triton"]
ROUTERS = {
    "softmax": ExpertChoice(),
    "normalized": ExpertChoice(is_normalized=True),
    "of chosen": ExpertChoice("softmax_of_chosen"),
    "corrected softmax": ExpertChoice(has_correction=True),
    "sigmoid": ExpertChoice("sigmoid"),
    "least sum": ExpertChoice("sigmoid", is_normalized=True, least_sum=0.5),
    "corrected": ExpertChoice("sigmoid", is_normalized=True, has_correction=True),
    "groups": ExpertChoice(
        "sigmoid", is_normalized=True, has_correction=True, num_groups=4, num_chosen_groups=2, scaling=2.5
    ),
    "groups by their best": ExpertChoice(num_groups=4, num_chosen_groups=2, num_compared=1, scaling=2.5),
    "groups of one": ExpertChoice("sigmoid", num_groups=12, num_chosen_groups=4),
}


def make_router(router: ExpertChoice, backend: str = "torch", *, batch_invariant: bool = False) -> TorchRouter:
    spec = MoeSpec(EXPERTS, PER_TOKEN, 8, [True], router)
    weights = MoeWeights(ROUTER_ED, 0, NOTHING, NOTHING, CORRECTION_E if router.has_correction else None)
    return TorchRouter(spec, weights, make_operations(backend, batch_invariant=batch_invariant))


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(3))


def expected(router: ExpertChoice, x_D: torch.Tensor) -> dict[int, float]:
    """The weights of a token's experts, by id."""
    logits_E = (ROUTER_ED.double() @ x_D.double()).tolist()
    exponentials = [torch.tensor(logit).double().exp().item() for logit in logits_E]
    total = sum(exponentials)
    scores = {
        "softmax": [each / total for each in exponentials],
        "softmax_of_chosen": logits_E,
        "sigmoid": [each / (1 + each) for each in exponentials],
    }[router.scores]
    corrections = CORRECTION_E.tolist() if router.has_correction else [0.0] * EXPERTS
    choice = [score + correction for score, correction in zip(scores, corrections, strict=True)]
    size = EXPERTS // router.num_groups
    groups = [range(first, first + size) for first in range(0, EXPERTS, size)]
    groups.sort(
        key=lambda group: -sum(sorted((choice[expert] for expert in group), reverse=True)[: router.num_compared])
    )
    allowed = [expert for group in groups[: router.num_chosen_groups] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[:PER_TOKEN]
    weights = [exponentials[expert] if router.scores == "softmax_of_chosen" else scores[expert] for expert in chosen]
    divisor = sum(weights) if router.is_normalized or router.scores == "softmax_of_chosen" else 1.0
    if router.is_normalized and router.scores == "sigmoid":
        divisor += router.least_sum
    return {expert: router.scaling * weight / divisor for expert, weight in zip(chosen, weights, strict=True)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_the_router_gives_each_token_the_experts_and_weights_of_the_formula(router, backend):
    made = make_router(router, backend)
    x_ND = tokens(20)
    weights_NK, ids_NK = made(x_ND.to(made.linear.weight.device))
    for x_D, weights, ids in zip(x_ND, weights_NK.tolist(), ids_NK.tolist(), strict=True):
        assert dict(zip(ids, weights, strict=True)) == pytest.approx(expected(router, x_D), rel=1e-4)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_the_router_takes_a_step_without_tokens(router):
    weights_NK, ids_NK = make_router(router)(tokens(0))
    assert weights_NK.shape == ids_NK.shape == (0, PER_TOKEN)


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_a_batch_invariant_router_gives_a_token_the_same_bits_alone(router, backend):
    made = make_router(router, backend, batch_invariant=True)
    x_ND = tokens(37)
    weights_NK, ids_NK = made(x_ND)
    for row in range(len(x_ND)):
        alone_1K, ids_1K = made(x_ND[row : row + 1])
        assert torch.equal(alone_1K[0], weights_NK[row])
        assert torch.equal(ids_1K[0], ids_NK[row])


def test_the_routers_float32_logits_are_not_rounded():
    exact_NK, ids_NK = make_router(ROUTERS["corrected"])(tokens(9).bfloat16().float())
    spec = MoeSpec(EXPERTS, PER_TOKEN, 8, [True], ROUTERS["corrected"])
    made = TorchRouter(spec, MoeWeights(ROUTER_ED, 0, NOTHING, NOTHING, CORRECTION_E), make_operations("torch"))
    weights_NK, found_NK = made(tokens(9).bfloat16())
    assert weights_NK.dtype == torch.bfloat16
    assert torch.equal(found_NK, ids_NK)
    assert torch.equal(weights_NK, exact_NK.bfloat16())


def test_router_scores_that_are_all_zero_give_weights_of_zero():
    made = make_router(ExpertChoice("sigmoid", is_normalized=True))
    x_1D = -1000 * torch.linalg.lstsq(ROUTER_ED, torch.ones(EXPERTS, 1)).solution.t()
    weights_1K, _ = made(x_1D)
    assert not weights_1K.isnan().any()
