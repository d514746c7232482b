"""A mixture of experts gives what the obvious way gives, however many tokens and whoever holds the experts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import interpreted_triton  # noqa: F401  # before whatever imports Triton
import pytest
import torch
from native_kernels import needs_kernels
from small_model import make_operations, sparse_layer
from torch.distributed import HashStore
from torch.nn import functional
from waiting import LONG_S

from raycore.layers.operations import Operations
from raycore.parallel.collectives import SharedMemoryCollectives
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.models import ExpertChoice, ExpertShare, MoeSpec
from raycore.parts.experts.parallel import ExpertParallel, SplitExperts
from raycore.parts.experts.weights import MoeWeights

CPU = torch.device("cpu")
HIDDEN = 12
SPEC = MoeSpec(
    num_experts=5,
    num_experts_per_tok=2,
    intermediate_size=8,
    sparse_layers=[True],
    router=ExpertChoice(is_normalized=True),
)
GENERATOR = torch.Generator().manual_seed(5)
ROUTER_ED = torch.randn(5, HIDDEN, generator=GENERATOR)
GATE_EFD, UP_EFD = torch.randn(2, 5, 8, HIDDEN, generator=GENERATOR)
DOWN_EDF = torch.randn(5, HIDDEN, 8, generator=GENERATOR)
SHARED_GATE_FD, SHARED_UP_FD = torch.randn(2, 32, HIDDEN, generator=GENERATOR)
SHARED_DOWN_DF = torch.randn(HIDDEN, 32, generator=GENERATOR)
GATE_1D = torch.randn(1, HIDDEN, generator=GENERATOR)
WHOLE = SPEC.split_experts(0, 1)


def part(share: ExpertShare) -> MoeWeights:
    experts, rows = slice(share.experts.start, share.experts.stop), slice(share.rows.start, share.rows.stop)
    gate_up_EFD = torch.cat([GATE_EFD[experts, rows], UP_EFD[experts, rows]], dim=1)
    return MoeWeights(ROUTER_ED, share.experts.start, gate_up_EFD, DOWN_EDF[experts, :, rows].contiguous())


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def assert_near(found_TD: torch.Tensor, expected_TD: torch.Tensor) -> None:
    """Rounding errors of sums in any order: terms are as large as 50, a missing expert or row costs whole units."""
    torch.testing.assert_close(found_TD, expected_TD, rtol=1e-5, atol=1e-3)


def expected(x_TD: torch.Tensor, spec: MoeSpec = SPEC) -> torch.Tensor:
    """Token by token, expert by expert."""
    out_TD = torch.zeros_like(x_TD)
    for x_D, out_D in zip(x_TD, out_TD, strict=True):
        likely_E = torch.softmax(ROUTER_ED @ x_D, 0)
        chosen = likely_E.argsort(descending=True)[: spec.num_experts_per_tok]
        total = likely_E[chosen].sum() if spec.router.is_normalized else 1.0
        for expert in chosen.tolist():
            inner_F = functional.silu(GATE_EFD[expert] @ x_D) * (UP_EFD[expert] @ x_D)
            out_D += likely_E[expert] / total * (DOWN_EDF[expert] @ inner_F)
    return out_TD


def chosen(x_TD: torch.Tensor) -> list[list[int]]:
    """The experts of each token, best first."""
    return (x_TD @ ROUTER_ED.t()).argsort(dim=1, descending=True)[:, : SPEC.num_experts_per_tok].tolist()


def on_every_rank(size, work):
    store = HashStore()

    def run(rank: int):
        with torch.inference_mode():
            return work(SharedMemoryCollectives.join(store, rank, size, timeout_s=LONG_S), rank)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize(
    ("backend", "num_tokens"), [*(("torch", num_tokens) for num_tokens in (0, 1, 2, 70)), ("triton", 0), ("triton", 3)]
)
def test_a_sparse_layer_equals_the_formula_of_its_experts(backend, num_tokens, is_normed):
    spec = MoeSpec(5, 2, 8, [True], ExpertChoice(is_normalized=is_normed))
    operations = make_operations(backend)
    layer = sparse_layer(spec, part(WHOLE), SplitExperts(TensorParallel()), operations)
    x_TD, residual_TD = tokens(num_tokens), tokens(num_tokens, seed=1)
    noted: list[torch.Tensor] = []
    layer.note_choices(noted.append)
    found_TD = layer.add_to(residual_TD.clone().to(operations.device), x_TD.to(operations.device))
    assert_near(found_TD.cpu(), residual_TD + expected(x_TD, spec))
    assert [ids_TK.tolist() for ids_TK in noted] == [chosen(x_TD)]


@pytest.mark.parametrize("share_of", [SPEC.split_experts, SPEC.whole_experts], ids=["split", "whole"])
def test_experts_split_over_ranks_add_up_to_the_formula(share_of):
    x_TD = tokens(9)

    def work(collectives, rank):
        ranks = SplitExperts(TensorParallel(rank, 2, collectives))
        layer = sparse_layer(SPEC, part(share_of(rank, 2)), ranks, Operations(CPU))
        return layer.add_to(torch.zeros_like(x_TD), x_TD)

    first, second = on_every_rank(2, work)
    assert_near(first, expected(x_TD))
    assert torch.equal(first, second)


@pytest.mark.parametrize(("dp_size", "tp_size"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_experts_shared_by_engines_give_each_token_the_formulas_result(dp_size, tp_size):
    """Uneven experts, uneven tokens, other numbers of rows in the last layer, engines without any."""
    steps = [([4, 1, 3], [1, 1, 0]), ([0, 7, 2], [0, 2, 2]), ([0, 0, 0], [0, 0, 0]), ([3, 0, 0], [0, 0, 0])]
    size = dp_size * tp_size

    def work(collectives, rank):
        dp_rank, tp_rank = divmod(rank, tp_size)
        ranks = ExpertParallel(dp_rank, tp_rank, tp_size, collectives, CPU)
        weights = part(SPEC.whole_experts(rank, size))
        layer, last = (
            sparse_layer(SPEC, weights, ranks, Operations(CPU), is_last=is_last) for is_last in (False, True)
        )
        noted: list[torch.Tensor] = []
        for each in (layer, last):
            each.note_choices(noted.append)
        for seed, (num_tokens, num_kept) in enumerate(steps):
            is_busy = ranks.begin(num_tokens[dp_rank], num_kept[dp_rank])
            assert is_busy == any(num_tokens[:dp_size])
            if not is_busy:
                continue
            if not num_tokens[dp_rank]:
                layer.forward_nothing()
                last.forward_nothing()
                continue
            for used, counts in ((layer, num_tokens), (last, num_kept)):
                x_TD = tokens(counts[dp_rank], seed=seed * 10 + dp_rank)
                assert_near(used.add_to(torch.zeros_like(x_TD), x_TD), expected(x_TD))
                assert noted[-1].tolist() == chosen(x_TD), "those of this engine's tokens"

    on_every_rank(size, work)


def add_shared_part(weights: MoeWeights, tp_rank: int, tp_size: int, has_gate: bool) -> None:
    part = slice(tp_rank * 32 // tp_size, (tp_rank + 1) * 32 // tp_size)
    weights.shared_gate_up_FD = torch.cat([SHARED_GATE_FD[part], SHARED_UP_FD[part]])
    weights.shared_down_DF = SHARED_DOWN_DF[:, part].contiguous()
    weights.shared_gate_1D = GATE_1D if has_gate else None


def expected_with_shared(x_TD: torch.Tensor, has_gate: bool) -> torch.Tensor:
    inner_TF = functional.silu(x_TD @ SHARED_GATE_FD.t()) * (x_TD @ SHARED_UP_FD.t())
    shared_TD = inner_TF @ SHARED_DOWN_DF.t()
    return expected(x_TD) + (shared_TD * torch.sigmoid(x_TD @ GATE_1D.t()) if has_gate else shared_TD)


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_kernels), "triton"])
def test_a_sparse_layer_adds_its_shared_experts_to_every_token(backend, has_gate):
    weights = part(WHOLE)
    add_shared_part(weights, 0, 1, has_gate)
    operations = make_operations(backend)
    layer = sparse_layer(SPEC, weights, SplitExperts(TensorParallel()), operations)
    for num_tokens in (1, 3):
        x_TD, residual_TD = tokens(num_tokens), tokens(num_tokens, seed=1)
        found_TD = layer.add_to(residual_TD.clone().to(operations.device), x_TD.to(operations.device))
        assert_near(found_TD.cpu(), residual_TD + expected_with_shared(x_TD, has_gate))
    layer.forward_nothing()


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize(("dp_size", "tp_size"), [(1, 2), (2, 1), (2, 2)])
def test_shared_experts_process_the_tokens_of_their_engine(dp_size, tp_size, has_gate):
    size, num_tokens, stores = dp_size * tp_size, [3, 0, 5], [HashStore() for _ in range(dp_size)]

    def work(collectives, rank):
        dp_rank, tp_rank = divmod(rank, tp_size)
        engine = TensorParallel(
            tp_rank, tp_size, SharedMemoryCollectives.join(stores[dp_rank], tp_rank, tp_size, timeout_s=LONG_S)
        )
        ranks = ExpertParallel(dp_rank, tp_rank, tp_size, collectives, CPU)
        weights = part(SPEC.whole_experts(rank, size))
        add_shared_part(weights, tp_rank, tp_size, has_gate)
        layer = sparse_layer(SPEC, weights, ranks, Operations(CPU), engine)
        for seed in range(len(num_tokens)):
            own = num_tokens[(seed + dp_rank) % len(num_tokens)]
            if not ranks.begin(own, own):
                continue
            x_TD = tokens(own, seed=seed * 10 + dp_rank)
            found_TD = layer.add_to(torch.zeros_like(x_TD), x_TD) if own else layer.forward_nothing()
            if own:
                assert_near(found_TD, expected_with_shared(x_TD, has_gate))

    on_every_rank(size, work)


def test_expert_shares_are_disjoint_and_complete():
    for size in range(1, 8):
        shares = [SPEC.whole_experts(rank, size).experts for rank in range(size)]
        assert [expert for share in shares for expert in share] == list(range(5))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
