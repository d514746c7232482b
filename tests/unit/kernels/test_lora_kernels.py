"""What the native kernels add for adapters is what torch's products add, on every instruction set of this processor."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from kernel_bits import INSTRUCTION_SETS
from native_kernels import assert_near, needs_kernels, randn

from raycore.kernels import library
from raycore.layers.linear import PlainLinear
from raycore.messages import NO_ADAPTER
from raycore.parts.adapters.layers import AdapterRows, NativeAdaptedLinear, PackedLora
from raycore.parts.adapters.weights import LoraLinear, LoraPart

pytestmark = needs_kernels
CPU = torch.device("cpu")
SETTINGS = hypothesis.settings(max_examples=40, suppress_health_check=list(hypothesis.HealthCheck))


@pytest.fixture(params=INSTRUCTION_SETS)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    before = library.load()
    assert before is not None
    if library.choose(request.param) is None:
        pytest.skip("this processor hasn't got these instructions")
    yield
    library.choose(before)


def make_adapter(seed: int, num_inputs: int, sizes: list[int], dtype: torch.dtype) -> LoraLinear:
    """An adapter that changes some parts of a layer, with a rank of its own for each."""
    rng = np.random.default_rng(seed)
    ranks = (rng.integers(1, 20, len(sizes)) * (rng.random(len(sizes)) < 0.7)).tolist()
    firsts = np.cumsum([0, *ranks]).tolist(), np.cumsum([0, *sizes]).tolist()
    parts = tuple(
        LoraPart(firsts[0][i], rank, firsts[1][i], (randn(seed + i, rank, sizes[i]) / 8).to(dtype))
        for i, rank in enumerate(ranks)
        if rank
    )
    return LoraLinear((randn(seed + 9, sum(ranks), num_inputs) / 8).to(dtype), parts)


def make_layer(
    rows: AdapterRows, adapters: dict[int, LoraLinear], num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> NativeAdaptedLinear:
    layer = NativeAdaptedLinear(PlainLinear(torch.zeros(num_outputs, num_inputs, dtype=dtype), None), rows, 6)
    for slot, own in adapters.items():
        layer.put(slot, PackedLora.of(own) if own.parts else None)
    return layer


@SETTINGS
@hypothesis.given(
    dtype=strategies.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=strategies.integers(0, 1 << 20),
    slots=strategies.lists(strategies.integers(NO_ADAPTER, 5), min_size=1, max_size=50)
    | strategies.lists(strategies.integers(0, 1), min_size=90, max_size=140),
    half_inputs=strategies.integers(1, 100),
    sizes=strategies.lists(strategies.sampled_from([1, 7, 16, 48, 128, 600]), min_size=1, max_size=3),
)
def test_the_product_of_a_rows_own_adapter_is_added_to_the_row(kernels, dtype, seed, slots, half_inputs, sizes) -> None:
    num_inputs, num_outputs = 2 * half_inputs, sum(sizes)
    adapters = {slot: make_adapter(seed + 100 * slot, num_inputs, sizes, dtype) for slot in (0, 1, 3, 4, 5)}
    rows = AdapterRows(CPU, is_native=True)
    rows.begin_step(np.array(slots), np.arange(len(slots)))
    x = randn(seed, len(slots), num_inputs).to(dtype)
    found = make_layer(rows, adapters, num_inputs, num_outputs, dtype)(x)
    expected, scale = torch.zeros(len(slots), num_outputs).double(), torch.zeros(len(slots), num_outputs).double()
    for row, slot in enumerate(slots):
        own = adapters.get(slot)
        for part in () if own is None else own.parts:
            a = own.a_RI[part.first_row : part.first_row + part.rank].double()
            columns = slice(part.first_output, part.first_output + part.b_RO.shape[1])
            expected[row, columns] = x[row].double() @ a.t() @ part.b_RO.double()
            # A x is rounded, too
            scale[row, columns] = 3 * (x[row].double().abs() @ a.t().abs()) @ part.b_RO.double().abs()
    assert_near(found, expected, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_kernels_give_a_row_the_same_bits_in_any_batch(kernels, dtype: torch.dtype) -> None:
    adapters = {slot: make_adapter(slot, 130, [200, 70, 48], dtype) for slot in range(3)}
    slots = np.array([0, 1, 1, 2, 1, 1, NO_ADAPTER, 1, 0, 1, 1])
    rows = AdapterRows(CPU, is_native=True, batch_invariant=True)
    layer = make_layer(rows, adapters, 130, 318, dtype)
    x = randn(0, len(slots), 130).to(dtype)
    rows.begin_step(slots, np.arange(len(slots)))
    together = layer(x)
    for row in range(len(slots)):
        rows.begin_step(slots[row : row + 1], np.arange(1))
        assert torch.equal(layer(x[row : row + 1])[0], together[row])


def test_lora_kernels_refuse_arguments_that_would_be_read_out_of_bounds() -> None:
    adapters = torch.zeros(2, 17, dtype=torch.int64)
    x, rows, slots = torch.zeros(3, 4), torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1])
    with pytest.raises(RuntimeError, match="slots of adapters"):
        torch.ops.raycore.lora_shrink(x, rows, slots + 1, adapters, 4)
    with pytest.raises(RuntimeError, match="rows and slots"):
        torch.ops.raycore.lora_shrink(x, rows, slots[:2], adapters, 4)
    with pytest.raises(RuntimeError, match=r"adapters \[slots, 17\]"):
        torch.ops.raycore.lora_shrink(x, rows, slots, adapters[:, :16], 4)
    with pytest.raises(RuntimeError, match="rows of x or y"):
        torch.ops.raycore.lora_shrink(x, rows + 1, slots, adapters, 4)
    with pytest.raises(RuntimeError, match="rows of x or y"):
        torch.ops.raycore.lora_expand(x, x, rows + 1, slots, adapters)
    with pytest.raises(RuntimeError, match="products"):
        torch.ops.raycore.lora_expand(x, x[:2], rows, slots, adapters)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (1, 5),  # rows of A
        (3, 2),  # the first row of a part, of two
        (4, 3),  # the rank
        (5, 1),  # the first output, of four
        (6, 5),  # the outputs
    ],
)
def test_adapters_that_reach_beyond_products_and_outputs_are_refused(place: int, wrong: int) -> None:
    packed = torch.ops.raycore.pack_linear(torch.zeros(4, 4))
    x, around = torch.zeros(3, 4), (torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
    adapters = torch.zeros(2, 17, dtype=torch.int64)
    adapters[1, :7] = torch.tensor([packed.data_ptr(), 4, packed.data_ptr(), 1, 2, 0, 4])
    products = torch.ops.raycore.lora_shrink(x, *around, adapters, 4)[:, :3].contiguous()
    torch.ops.raycore.lora_expand(x, products, *around, adapters)
    adapters[1, place] = wrong

    def add() -> None:
        torch.ops.raycore.lora_shrink(x, *around, adapters, 4)
        torch.ops.raycore.lora_expand(x, products, *around, adapters)

    with pytest.raises(RuntimeError, match=r"raycore's kernels expect .*adapters"):
        add()
