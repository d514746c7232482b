"""With batch invariance, sums over ranks have the same bits for any number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from native_kernels import needs_kernels
from small_model import make_operations, sparse_layer
from torch import Tensor

from raycore.layers.linear import LinearInParts, ReducedLinear
from raycore.parallel.tensor_parallel import TensorParallel, sum_in_pairs
from raycore.parts.experts.models import ExpertChoice, MoeSpec
from raycore.parts.experts.parallel import SplitExperts
from raycore.parts.experts.weights import MoeWeights


class Gathered:
    """Collectives among the threads of one process."""

    def __init__(self, size: int) -> None:
        self._parts: list[Tensor | None] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def of(self, rank: int) -> TensorParallel:
        gathered = self

        class Collectives:
            def all_gather(self, x: Tensor) -> list[Tensor]:
                gathered._parts[rank] = x
                gathered._barrier.wait()
                parts = list(gathered._parts)
                gathered._barrier.wait()
                return parts

            def close(self) -> None: ...

        return TensorParallel(rank, len(self._parts), Collectives())


def on_ranks(num_ranks: int, work: Callable[[TensorParallel], Tensor]) -> list[Tensor]:
    """Each rank's result."""
    gathered = Gathered(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(
            pool.map(lambda rank: work(TensorParallel() if num_ranks == 1 else gathered.of(rank)), range(num_ranks))
        )


def own_part(x: Tensor, ranks: TensorParallel, dim: int = -1) -> Tensor:
    """The rank's part of a dimension."""
    return x.chunk(ranks.size, dim)[ranks.rank].contiguous()


def results(backend: str, weight_OI: Tensor, bias_O: Tensor, x_TI: Tensor, num_ranks: int) -> list[Tensor]:
    """Each rank's result."""
    operations = make_operations(backend, batch_invariant=True)

    def result(ranks: TensorParallel) -> Tensor:
        own_OI = own_part(weight_OI, ranks)
        linear = operations.linear(own_OI, bias_O if ranks.rank == 0 else None, ranks)
        assert isinstance(linear, LinearInParts)
        assert torch.equal(linear.weight, own_OI)
        return linear.add_to(torch.ones(len(x_TI), len(weight_OI), dtype=x_TI.dtype), own_part(x_TI, ranks))

    return on_ranks(num_ranks, result)


in_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
by_backends = pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_kernels)])


@in_dtypes
@by_backends
def test_any_number_of_ranks_gives_the_same_bits(backend, dtype):
    torch.manual_seed(0)
    weight_OI, bias_O, x_TI = torch.randn(48, 128).to(dtype), torch.randn(48).to(dtype), torch.randn(21, 128).to(dtype)
    (alone,) = results(backend, weight_OI, bias_O, x_TI, 1)
    for num_ranks in (2, 4):
        assert all(torch.equal(each, alone) for each in results(backend, weight_OI, bias_O, x_TI, num_ranks))
    expected = x_TI.double() @ weight_OI.double().t() + bias_O.double() + 1
    torch.testing.assert_close(alone.double(), expected, atol=0.3 if dtype == torch.bfloat16 else 1e-4, rtol=0.02)


@in_dtypes
@needs_kernels
def test_ranks_that_divide_experts_get_the_same_bits(dtype):
    torch.manual_seed(0)
    spec = MoeSpec(5, 2, 64, [True], ExpertChoice(is_normalized=True))
    router_ED, gate_EFD, up_EFD = torch.randn(5, 32).to(dtype), *torch.randn(2, 5, 64, 32).to(dtype)
    down_EDF, down_bias_ED, x_TD = (
        (torch.randn(5, 32, 64) / 8).to(dtype),
        torch.randn(5, 32).to(dtype),
        torch.randn(9, 32),
    )
    operations = make_operations("native", batch_invariant=True)

    def result(ranks: TensorParallel) -> Tensor:
        gate_up_EFD = torch.cat([own_part(gate_EFD, ranks, 1), own_part(up_EFD, ranks, 1)], dim=1)
        weights = MoeWeights(router_ED, 0, gate_up_EFD, own_part(down_EDF, ranks, 2))
        if ranks.rank == 0:
            weights.down_bias_ED = down_bias_ED
        layer = sparse_layer(spec, weights, SplitExperts(ranks), operations)
        assert layer.experts.in_parts
        assert torch.equal(layer.experts.weights_of(3).down_DF, own_part(down_EDF[3], ranks))
        assert layer.apply(x_TD[:0].to(dtype)).shape == (0, 32)
        return layer.apply(x_TD.to(dtype))

    (alone,) = on_ranks(1, result)
    for num_ranks in (2, 4):
        assert all(torch.equal(each, alone) for each in on_ranks(num_ranks, result))
    weights = MoeWeights(router_ED, 0, torch.cat([gate_EFD, up_EFD], dim=1), down_EDF, down_bias_ED=down_bias_ED)
    whole = sparse_layer(spec, weights, SplitExperts(TensorParallel()), make_operations("torch"))
    expected = whole.apply(x_TD.to(dtype))
    torch.testing.assert_close(alone, expected, atol=0.5 if dtype == torch.bfloat16 else 1e-3, rtol=0.02)


@in_dtypes
def test_norms_over_all_ranks_have_the_same_bits(dtype):
    torch.manual_seed(0)
    operations = make_operations("torch", batch_invariant=True)
    q_weight_O, k_weight_O, group_weight_O = torch.rand(96), torch.rand(32), torch.rand(128)
    q_TO, k_TO, x_TO = (torch.randn(7, size).to(dtype) for size in (96, 32, 128))

    def result(ranks: TensorParallel) -> Tensor:
        norm = operations.width_norm(own_part(q_weight_O, ranks), own_part(k_weight_O, ranks), 1e-6, ranks)
        qkv_TO = torch.cat([own_part(q_TO, ranks), own_part(k_TO, ranks), torch.ones(7, 8, dtype=dtype)], dim=1)
        norm.apply_(qkv_TO)
        group_norm = operations.group_norm(own_part(group_weight_O, ranks).to(dtype), 1, 1e-6, ranks)
        own_q_TO, own_k_TO, _ = qkv_TO.split([96 // ranks.size, 32 // ranks.size, 8], dim=1)
        own = own_q_TO, own_k_TO, group_norm(own_part(x_TO, ranks))
        return torch.cat([torch.cat(ranks.all_gather(each.contiguous()), dim=1) for each in own], dim=1)

    (alone,) = on_ranks(1, result)
    for num_ranks in (2, 4):
        assert all(torch.equal(each, alone) for each in on_ranks(num_ranks, result))
    norms = zip((q_TO, k_TO, x_TO), (q_weight_O, k_weight_O, group_weight_O), strict=True)
    expected = [torch.nn.functional.rms_norm(x.float(), x.shape[1:], weight, 1e-6) for x, weight in norms]
    torch.testing.assert_close(alone.float(), torch.cat(expected, dim=1), atol=1e-4, rtol=0.02)


def test_layers_that_cannot_be_divided_are_summed_over_ranks():
    operations = make_operations("torch", batch_invariant=True)
    ranks = Gathered(3).of(0)
    assert isinstance(operations.linear(torch.randn(8, 16), None, ranks), ReducedLinear)
    assert not isinstance(operations.linear(torch.randn(8, 18), None, TensorParallel()), LinearInParts)


def test_sums_are_those_of_pairs():
    parts = [torch.tensor([each]) for each in (1e8, 1.0, -1e8, 1.0)]
    assert sum_in_pairs(parts).item() == 0.0  # one after the other, they would make 1
