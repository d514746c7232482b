"""With batch invariance, sums over ranks have the same bits for any number of ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernels import needs_kernels
from small_model import make_operations
from torch import Tensor

from raycore.layers.linear import LinearInParts, ReducedLinear, sum_in_pairs
from raycore.parallel.tensor_parallel import TensorParallel


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


def results(backend: str, weight_OI: Tensor, bias_O: Tensor, x_TI: Tensor, num_ranks: int) -> list[Tensor]:
    """Each rank's result."""
    operations = make_operations(backend, batch_invariant=True)
    gathered = Gathered(num_ranks)

    def result(rank: int) -> Tensor:
        columns = slice(rank * weight_OI.shape[1] // num_ranks, (rank + 1) * weight_OI.shape[1] // num_ranks)
        ranks = TensorParallel() if num_ranks == 1 else gathered.of(rank)
        own_OI = weight_OI[:, columns].contiguous()
        linear = operations.linear(own_OI, bias_O if rank == 0 else None, ranks)
        assert isinstance(linear, LinearInParts)
        assert torch.equal(linear.weight, own_OI)
        return linear.add_to(torch.ones(len(x_TI), len(weight_OI), dtype=x_TI.dtype), x_TI[:, columns].contiguous())

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(result, range(num_ranks)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_kernels)])
def test_any_number_of_ranks_gives_the_same_bits(backend, dtype):
    torch.manual_seed(0)
    weight_OI, bias_O, x_TI = torch.randn(48, 128).to(dtype), torch.randn(48).to(dtype), torch.randn(21, 128).to(dtype)
    (alone,) = results(backend, weight_OI, bias_O, x_TI, 1)
    for num_ranks in (2, 4):
        assert all(torch.equal(each, alone) for each in results(backend, weight_OI, bias_O, x_TI, num_ranks))
    expected = x_TI.double() @ weight_OI.double().t() + bias_O.double() + 1
    torch.testing.assert_close(alone.double(), expected, atol=0.3 if dtype == torch.bfloat16 else 1e-4, rtol=0.02)


def test_layers_that_cannot_be_divided_are_summed_over_ranks():
    operations = make_operations("torch", batch_invariant=True)
    ranks = Gathered(3).of(0)
    assert isinstance(operations.linear(torch.randn(8, 16), None, ranks), ReducedLinear)
    assert not isinstance(operations.linear(torch.randn(8, 18), None, TensorParallel()), LinearInParts)


def test_sums_are_those_of_pairs():
    parts = [torch.tensor([each]) for each in (1e8, 1.0, -1e8, 1.0)]
    assert sum_in_pairs(parts).item() == 0.0  # one after the other, they would make 1
