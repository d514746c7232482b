"""The native kernels against their formulas in float64, with every instruction set that this processor has."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import hypothesis
import numpy as np
import pytest
import torch
from delta_contract import DELTA
from hypothesis import strategies
from kernel_bits import INSTRUCTION_SETS
from mamba2_contract import MAMBA2
from native_kernels import GATES, ROUNDING, EmulatedOps, assert_near, emulated_ops, needs_kernels, randn, size_of_gated
from state_contract import MIXED, Batch, Make, Outcome, Rule, Sizes, sizes, twice

from raycore.kernels import library
from raycore.kernels.gates import native_gate_arguments
from raycore.layers.gate import gate_and_mul
from raycore.models.spec import Gate
from raycore.state.native import NativeDelta, NativeMamba2

pytestmark = [needs_kernels, pytest.mark.timeout(400)]
"""Emulation is slow."""

EPS = 1e-6
OFFSETS = strategies.sampled_from([0.0, 1.0])
DTYPES = strategies.sampled_from([torch.float32, torch.bfloat16, torch.float16])
ANY_GATE = strategies.sampled_from(GATES)
SEEDS = strategies.integers(0, 1 << 32)
SILU = native_gate_arguments("silu")
SETTINGS = hypothesis.settings(max_examples=60)


ops = torch.ops.raycore


@pytest.fixture(
    autouse=True,
    params=[*INSTRUCTION_SETS, "neon, emulated"],
    scope="module",
)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    global ops
    before = library.load()
    assert before is not None
    if request.param == "neon, emulated":
        ops = emulated_ops()
    elif library.choose(request.param) is None:
        pytest.skip("this processor hasn't got it")
    yield
    library.choose(before)
    ops = torch.ops.raycore


@SETTINGS
@hypothesis.given(
    DTYPES, SEEDS, strategies.integers(0, 70), strategies.integers(1, 300), strategies.booleans(), OFFSETS
)
def test_rms_norm_equals_the_formula(
    dtype: torch.dtype, seed: int, num_rows: int, dim: int, is_slice: bool, offset: float
) -> None:
    x, weight = randn(seed, num_rows, 2 * dim).to(dtype) * 3, randn(seed + 1, dim).to(dtype)
    x = x[:, :dim] if is_slice else x[:, :dim].contiguous()
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * (offset + weight.double())
    assert_near(ops.rms_norm(x, weight, EPS, offset), expected)


@SETTINGS
@hypothesis.given(ANY_GATE, DTYPES, SEEDS, strategies.integers(0, 70), strategies.integers(1, 300))
def test_gate_and_mul_equals_the_formula(gate: Gate, dtype: torch.dtype, seed: int, num_rows: int, dim: int) -> None:
    x = (randn(seed, num_rows, 2 * dim) * 10).to(dtype)
    expected = gate_and_mul(gate, x.double())
    # a GELU that is rounded to bfloat16 is computed roughly: a tenth of the rounding
    is_rough = dtype == torch.bfloat16 and gate in ("gelu", "gelu_tanh")
    scale = expected.abs() * (1.1 if is_rough else 1.0)
    assert_near(ops.gate_and_mul(x, *native_gate_arguments(gate)), expected, scale)


@pytest.mark.parametrize("gate", ["silu", "gelu", "gelu_tanh"])
def test_activations_of_the_largest_numbers_do_not_overflow(gate: Gate) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[-largest, -1e4, -100.0, 0.0, 88.5, 1e4, largest, math.inf]])
    found = ops.gate_and_mul(torch.cat([x, torch.ones_like(x)], 1), *native_gate_arguments(gate))
    assert found.tolist() == [[0.0, 0.0, pytest.approx(0.0, abs=1e-30), 0.0, 88.5, 1e4, largest, math.inf]]


@SETTINGS
@hypothesis.given(DTYPES, SEEDS, strategies.integers(0, 9), strategies.integers(1, 150), strategies.integers(1, 600))
def test_few_rows_linear_equals_the_formula(
    dtype: torch.dtype, seed: int, num_rows: int, half_inputs: int, num_outputs: int
) -> None:
    x, weight = (
        randn(seed, num_rows, 2 * half_inputs).to(dtype),
        randn(seed + 1, num_outputs, 2 * half_inputs).to(dtype),
    )
    size = x.double().abs() @ weight.double().abs().t()
    assert_near(ops.few_rows_linear(x, weight), x.double() @ weight.double().t(), size)


@SETTINGS
@hypothesis.given(
    strategies.sampled_from(
        [
            (torch.float32, torch.float32),
            (torch.float32, torch.bfloat16),
            (torch.float32, torch.float16),
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.float16),
        ]
    ),
    SEEDS,
    strategies.integers(0, 40) | strategies.integers(1, 700),
    strategies.sampled_from([32, 64, 640]) | strategies.integers(1, 300).map(lambda half: 2 * half),
    strategies.sampled_from([16, 32, 96, 320]) | strategies.integers(1, 300),
    strategies.sampled_from([1, 3]),
    ANY_GATE,
)
def test_panel_linear_equals_the_formula_for_any_rows_and_threads(
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    num_threads: int,
    gate: Gate,
) -> None:
    dtype, stored = dtypes
    num_rows = min(num_rows, 50) if isinstance(ops, EmulatedOps) else num_rows
    x = randn(seed, num_rows, 2 * num_inputs).to(dtype)[:, :num_inputs]
    weight = randn(seed + 1, num_outputs, num_inputs).to(stored)
    bias, residual = randn(seed + 2, num_outputs).to(dtype), randn(seed + 3, num_rows, num_outputs).to(dtype)
    packed, no_bias = ops.pack_linear(weight), bias[:0]
    size = x.double().abs() @ weight.double().abs().t() + bias.abs() + residual.abs()
    product = x.double() @ weight.double().t()
    torch.set_num_threads(num_threads)
    assert_near(ops.panel_linear(x, packed, no_bias, num_outputs), product, size)
    found = ops.panel_linear(x, packed, bias, num_outputs)
    assert_near(found, product + bias.double(), size)
    sums = residual.clone()
    ops.add_panel_linear(sums, x, packed, bias)
    assert_near(sums, product + bias.double() + residual.double(), size)
    if num_outputs % 32 == 0:
        sums = (product + bias.double()).unflatten(1, (-1, 2, 16)).transpose(1, 2).flatten(1)
        sizes = size.unflatten(1, (-1, 2, 16)).transpose(1, 2).flatten(2)
        found_gated = ops.gated_panel_linear(x, packed, bias, *native_gate_arguments(gate))
        assert_near(found_gated, gate_and_mul(gate, sums), size_of_gated(gate, *sizes.unbind(1)))
    torch.set_num_threads(1)
    for row in {0, num_rows // 2, num_rows - 1} if num_rows else ():
        assert torch.equal(ops.panel_linear(x[row : row + 1], packed, bias, num_outputs)[0], found[row])


@SETTINGS
@hypothesis.given(DTYPES, SEEDS, strategies.integers(0, 9), strategies.integers(1, 300))
def test_most_likely_takes_the_first_of_the_largest_logits(
    dtype: torch.dtype, seed: int, num_rows: int, dim: int
) -> None:
    x = (randn(seed, num_rows, dim) * 2).round().to(dtype)  # few different values
    expected = [row.index(max(row)) for row in x.tolist()]
    assert ops.most_likely(x).tolist() == expected
    assert ops.most_likely(torch.cat([x, x + 9], 1)[:, :dim]).tolist() == expected


@SETTINGS
@hypothesis.given(
    SEEDS,
    strategies.integers(1, 300) | strategies.sampled_from([4096, 5003]),
    strategies.sampled_from([0.0, 0.02, 0.5, 0.98, 1.0]),
    strategies.booleans(),
)
def test_masks_forbid_tokens_and_keep_the_bits_of_all_others(
    seed: int, vocab_size: int, share: float, is_slice: bool
) -> None:
    logits = any_bits(seed, 7, 2 * vocab_size)
    logits = logits[:, :vocab_size] if is_slice else logits[:, :vocab_size].contiguous()
    rows = torch.randperm(7, generator=torch.Generator().manual_seed(seed))[: seed % 8]
    allowed = torch.rand(len(rows), vocab_size, generator=torch.Generator().manual_seed(seed + 1)) < share
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~allowed, -math.inf)
    ops.mask_logits(logits, rows, masks_of(allowed, beyond=bool(seed % 2)))
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))


def any_bits(seed: int, *shape: int) -> torch.Tensor:
    """float32 numbers, among them infinities, NaN of all kinds and denormal ones."""
    return (
        torch.randint(-(1 << 31), 1 << 31, shape, generator=torch.Generator().manual_seed(seed))
        .int()
        .view(torch.float32)
    )


def masks_of(allowed: torch.Tensor, *, beyond: bool) -> torch.Tensor:
    """Masks of these tokens. `beyond`: the bits after the last token."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32), value=beyond)
    return torch.as_tensor(np.packbits(padded.numpy(), axis=1, bitorder="little"))


def test_rms_norm_and_silu_keep_nan() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.tensor([[math.nan, 1.0] * 20], dtype=dtype)
        assert ops.rms_norm(x, torch.ones(40, dtype=dtype), EPS, 0.0).isnan().all()
        assert ops.gate_and_mul(x, *SILU).tolist()[0][0] != 0.0


def draw_one(logits: torch.Tensor, limits: list[float]) -> int:
    return ops.draw(logits[None], torch.tensor([limits], dtype=torch.float64)).item()


UNIFORM = strategies.floats(0, 1, exclude_max=True)


@SETTINGS
@hypothesis.given(
    dtype=DTYPES,
    seed=SEEDS,
    vocab_size=strategies.integers(1, 3000),
    temperature=strategies.sampled_from([0.3, 1.0, 5.0]),
    min_p=strategies.just(0.0) | strategies.floats(0, 1),
    top_k=strategies.none() | strategies.integers(1, 3000),
    top_p=strategies.just(1.0) | strategies.floats(0.01, 1),
    uniform=UNIFORM,
)
def test_draw_takes_the_token_at_its_share_of_the_kept_weights(
    dtype: torch.dtype,
    seed: int,
    vocab_size: int,
    temperature: float,
    min_p: float,
    top_k: int | None,
    top_p: float,
    uniform: float,
) -> None:
    """The token at which the running sum of the kept weights reaches its share, except where rounding decides."""
    logits = ((randn(seed, vocab_size) * 8).round() / 4 * temperature).to(dtype)  # weights are equal, or far apart
    top_k = min(top_k or vocab_size, vocab_size)
    found = draw_one(logits, [temperature, min_p, top_k, top_p, uniform])

    weights = ((logits.double() - logits.double().max()) / temperature).exp()
    hypothesis.assume(((weights - min_p).abs() > 1e-5).all())
    weights[weights < min_p] = 0
    largest = weights.sort(descending=True).values[:top_k]
    sums = largest.cumsum(0)
    hypothesis.assume(((sums / sums[-1] - top_p).abs() > 1e-6)[:-1].all())
    weights[weights < largest[min(int((sums < top_p * sums[-1]).sum()), top_k - 1)] * (1 - 1e-5)] = 0
    shares = weights.cumsum(0) / weights.sum()
    assert weights[found] > 0
    assert shares[found] > 1 - uniform - 1e-5
    assert shares[found] - weights[found] / weights.sum() < 1 - uniform + 1e-5


@hypothesis.settings(max_examples=10)
@hypothesis.given(SEEDS, UNIFORM)
def test_draw_takes_the_same_token_for_a_row_in_any_batch(seed: int, uniform: float) -> None:
    logits = randn(seed, 9, 5000).bfloat16()
    limits = torch.tensor([[0.8, 0.0, 40.0 * (i + 1), 0.9, uniform] for i in range(9)], dtype=torch.float64)
    torch.set_num_threads(3)
    together = ops.draw(logits, limits)
    torch.set_num_threads(1)
    assert together.tolist() == [draw_one(row, own.tolist()) for row, own in zip(logits, limits, strict=True)]


def test_draws_at_the_ends_of_the_unit_interval_take_a_kept_token() -> None:
    inf = math.inf
    logits = torch.tensor([-inf, 3.0, -inf, 3.0, 1.0, -inf])
    for uniform, expected in ((0.0, 3), (0.49, 3), (0.51, 1), (1 - 2**-53, 1)):
        for limits in ([1e-38, 0, 6, 1.0], [1.0, 0, 2, 1.0], [1.0, 1.0, 6, 1.0], [1.0, 0, 1, 1.0], [1.0, 0, 6, 0.01]):
            assert draw_one(logits, [*limits, uniform]) == expected  # equally likely tokens are kept together
    assert draw_one(logits, [1.0, 0, 6, 1.0, 0.0]) == 4  # no token of weight 0
    assert draw_one(torch.tensor([5.0]), [1.0, 0, 1, 1.0, 0.3]) == 0
    assert 0 <= draw_one(torch.full((300,), math.nan), [1.0, 0, 50, 0.9, 0.3]) < 300


@SETTINGS
@hypothesis.given(
    DTYPES, SEEDS, strategies.integers(1, 9), strategies.integers(1, 700), strategies.integers(0, 64), SEEDS
)
def test_logprobs_and_ranks_equal_the_formula(
    dtype: torch.dtype, seed: int, num_rows: int, dim: int, num_likely: int, token_seed: int
) -> None:
    logits = (randn(seed, num_rows, dim) * 8).to(dtype)
    token_ids = torch.randint(dim, (num_rows,), generator=torch.Generator().manual_seed(token_seed))
    num_likely = min(num_likely, dim)
    own, ranks, likely, likely_ids = ops.logprobs(logits, token_ids, num_likely)
    expected = torch.log_softmax(logits.double(), 1)
    own_logits = logits.gather(1, token_ids[:, None])
    assert_near(own, expected.gather(1, token_ids[:, None])[:, 0], 16.0)
    assert ranks.tolist() == (1 + (logits > own_logits).sum(1)).tolist()
    order = logits.double().sort(dim=1, descending=True, stable=True).indices[:, :num_likely]
    assert likely_ids.tolist() == order.tolist()
    assert_near(likely, expected.gather(1, order), 16.0)


def test_logprobs_of_infinite_and_missing_logits_are_defined() -> None:
    inf = math.inf
    logits = torch.tensor([[-inf, 3.0, -inf, 3.0, 1.0], [-inf, -inf, 0.5, -inf, -inf]])
    own, ranks, likely, likely_ids = ops.logprobs(logits, torch.tensor([0, 2]), 3)
    assert own.tolist() == [-inf, 0.0]
    assert ranks.tolist() == [4, 1]
    assert likely_ids.tolist() == [[1, 3, 4], [2, 0, 1]]
    assert likely[1].tolist() == [0.0, -inf, -inf]
    many = randn(0, 4, 160_000).bfloat16()
    own, *_ = ops.logprobs(many, torch.zeros(4, dtype=torch.int64), 0)
    assert_near(own, torch.log_softmax(many.double(), 1)[:, 0], 16.0)


@strategies.composite
def attention_steps(draw: strategies.DrawFn) -> dict[str, object]:
    num_kv_heads, group = draw(strategies.integers(1, 3)), draw(strategies.integers(1, 6))
    longest, max_size = (300, 2) if isinstance(ops, EmulatedOps) else (700, 5)
    lengths = draw(strategies.lists(strategies.integers(1, longest), min_size=1, max_size=max_size))
    return {
        "seed": draw(SEEDS),
        "dtype": draw(DTYPES),
        "has_scales": draw(strategies.booleans()),
        "num_heads": num_kv_heads * group,
        "num_kv_heads": num_kv_heads,
        "head_dim": draw(strategies.sampled_from([2, 8, 24, 32, 64, 80, 128, 256, 512])),
        "block_size": draw(strategies.sampled_from([2, 4, 16, 24, 32, 48, 256])),
        "lengths": lengths,
        "counts": [draw(strategies.integers(1, min(length, 90)) | strategies.just(1)) for length in lengths],
        "window": draw(strategies.just(0) | strategies.integers(1, 300)),
        "has_norm": draw(strategies.booleans()),
        "offset": draw(OFFSETS),
        "softcap": draw(strategies.sampled_from([0.0, 0.0, 0.7, 20.0])),
        "has_sinks": draw(strategies.booleans()),
        "num_threads": draw(strategies.sampled_from([1, 3])),
    }


class Cache:
    """A cache of random blocks, full of NaN, and attention's other arguments."""

    def __init__(self, step: dict) -> None:
        self.step = step
        heads, kv_heads, dim, size = (step[k] for k in ("num_heads", "num_kv_heads", "head_dim", "block_size"))
        num_blocks = [-(-length // size) for length in step["lengths"]]
        generator = torch.Generator().manual_seed(step["seed"])
        order = torch.randperm(sum(num_blocks), generator=generator).int()
        shape = len(order), 2, kv_heads, size * dim
        self.cache = torch.full(shape, math.nan, dtype=step["dtype"])
        if step["has_scales"]:
            scales = torch.full((*shape[:3], size), math.nan).view(torch.int8)
            self.cache = torch.cat([torch.full(shape, 127, dtype=torch.int8), scales], -1)
        self.tables = torch.full((len(num_blocks) + 1, max(num_blocks) + 1), -1, dtype=torch.int32)
        for slot, blocks in enumerate(order.split(num_blocks), start=1):
            self.tables[slot, : len(blocks)] = blocks
        angles = torch.rand(max(step["lengths"]), dim // 2, generator=generator) * 6
        self.turns = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
        self.norm = randn(step["seed"], heads + kv_heads, dim).to(step["dtype"])
        self.sinks = randn(step["seed"] + 1, heads) * 3

    def attend(self, qkv: torch.Tensor, sequences: list[list[int]]) -> torch.Tensor:
        step = self.step
        norm = self.norm if step["has_norm"] else self.norm[:0]
        window, scale = step["window"], step["head_dim"] ** -0.5
        sizes = step["num_heads"], step["num_kv_heads"], step["block_size"], window, scale
        rows, sinks = torch.tensor(sequences, dtype=torch.int32), self.sinks if step["has_sinks"] else self.sinks[:0]
        norms, parts = (norm, EPS, step["offset"]), (step["softcap"], sinks)
        plain = False, torch.empty(0, dtype=torch.int32)
        return ops.attention(qkv, *norms, self.turns, self.cache, self.tables, rows, *sizes, *parts, *plain)

    def stored(self, slot: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The integers [2, T, K, H], keys before values, and the scales [2, T, K, 1], of the first tokens of a slot."""
        dim, size = self.step["head_dim"], self.step["block_size"]
        blocks = self.cache[self.tables[slot, : -(-count // size)].long()]
        scales = blocks[..., size * dim :].contiguous().view(torch.float32).permute(1, 0, 3, 2).flatten(1, 2)
        keys, values = blocks[..., : size * dim].unbind(1)
        keys = keys.unflatten(-1, (dim // 2, size, 2)).permute(0, 3, 1, 2, 4)
        values = values.unflatten(-1, (size // 2, dim, 2)).permute(0, 2, 4, 1, 3).flatten(1, 2)
        return torch.stack([keys.flatten(0, 1).flatten(2), values.flatten(0, 1)])[:, :count], scales[:, :count, :, None]

    def expected(self, slot: int, qkv: torch.Tensor) -> torch.Tensor:
        """Attention of a slot's tokens, which are rounded where qkv stores them, to what the cache stores."""
        step = self.step
        heads, kv_heads, dim = step["num_heads"], step["num_kv_heads"], step["head_dim"]
        x = qkv.double().view(len(qkv), -1, dim)
        q_and_k, values = x[:, : heads + kv_heads], x[:, heads + kv_heads :]
        if step["has_norm"]:
            q_and_k = (
                q_and_k / (q_and_k.square().mean(-1, keepdim=True) + EPS).sqrt() * (step["offset"] + self.norm.double())
            )
        cosines, sines = self.turns[: len(qkv), None].double().unflatten(-1, (-1, 2)).unbind(-1)
        first, second = q_and_k.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([first * cosines - second * sines, second * cosines + first * sines], -1).flatten(-2)
        queries, keys = turned.to(step["dtype"]).double().split([heads, kv_heads], dim=1)
        if step["has_scales"]:
            numbers, scales = self.stored(slot, len(qkv))
            assert (numbers.abs().amax(-1) == 127).all()
            keys, values = check_rounding(torch.stack([keys, values]), numbers.double(), scales.double(), step["dtype"])
        keys, values = (each.repeat_interleave(heads // kv_heads, 1) for each in (keys, values))
        behind = torch.arange(len(qkv))[:, None] - torch.arange(len(qkv))
        is_seen = (behind >= 0) & (behind < (step["window"] or len(qkv)))
        scores = torch.einsum("tnh,snh->nts", queries, keys) * dim**-0.5
        if step["softcap"]:
            scores = step["softcap"] * torch.tanh(scores / step["softcap"])
        sinks = self.sinks.double()[:, None, None].expand(-1, len(qkv), int(step["has_sinks"]))
        scores = torch.cat([scores.masked_fill(~is_seen, -math.inf), sinks], -1)
        weights = scores.softmax(-1)[..., : len(qkv)]
        return torch.einsum("nts,snh->tnh", weights, values).flatten(1)


def check_rounding(
    x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check that integers are keys and values divided by their scales. Returns what they stand for."""
    off = (numbers * scales - x).abs() / scales
    assert off[1].max() < 0.501
    # a key may have been rounded in another direction before
    assert off[0].max() < 0.501 + 127 * 2 * ROUNDING[dtype]
    keys, values = numbers * scales
    return keys, values


@hypothesis.settings(max_examples=60)
@hypothesis.given(attention_steps())
def test_attention_over_the_paged_cache_equals_the_formula(step: dict) -> None:
    """Prefixes first, one after the other; then all sequences' ends in one step."""
    cache, lengths, counts = Cache(step), step["lengths"], step["counts"]
    width = (step["num_heads"] + 2 * step["num_kv_heads"]) * step["head_dim"]
    whole = [randn(step["seed"] + i, length, width).to(step["dtype"]) for i, length in enumerate(lengths)]
    torch.set_num_threads(step["num_threads"])
    for slot, (qkv, count) in enumerate(zip(whole, counts, strict=True), start=1):
        if len(qkv) > count:
            cache.attend(qkv[:-count].clone(), [[slot, 0, len(qkv) - count, 0]])
    ends = [qkv[-count:] for qkv, count in zip(whole, counts, strict=True)]
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    sequences = [
        [slot, first, count, length - count]
        for slot, (first, count, length) in enumerate(zip(firsts, counts, lengths, strict=True), start=1)
    ]
    found = cache.attend(torch.cat(ends), sequences)
    torch.set_num_threads(1)
    for slot, (qkv, part) in enumerate(zip(whole, found.split(counts), strict=True), start=1):
        largest = qkv.double().abs().max()
        # a score's rounding moves a weight by its share, and a score is a sum of head_dim products
        assert_near(part, cache.expected(slot, qkv)[-len(part) :], 4 * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "window"), [(32, 0), (64, 0), (24, 0), (64, 50), (128, 7)])
def test_two_sided_attention_equals_the_formula_whatever_else_the_step_has(
    dtype: torch.dtype, dim: int, window: int
) -> None:
    """`window`: how far a token sees, itself included. The emulated kernels have no such operation."""
    if isinstance(ops, EmulatedOps):
        pytest.skip("the program for arm64 doesn't run it")
    lengths, heads = [1, 300, 7, 33, 128, 257], 3
    whole = [randn(length, length, 3 * heads * dim).to(dtype) for length in lengths]

    def attend(prompts: list[torch.Tensor]) -> torch.Tensor:
        firsts = [sum(map(len, prompts[:index])) for index in range(len(prompts))]
        sequences = [
            [index, first, len(each), 0] for index, (first, each) in enumerate(zip(firsts, prompts, strict=True))
        ]
        rows = torch.tensor(sequences, dtype=torch.int32)
        return ops.two_sided_attention(torch.cat(prompts), torch.empty(0), rows, heads, window, dim**-0.5)

    for qkv, found in zip(whole, attend(whole).split(lengths), strict=True):
        queries, keys, values = qkv.double().view(len(qkv), 3, heads, dim).unbind(1)
        distances = (torch.arange(len(qkv))[:, None] - torch.arange(len(qkv))).abs()
        scores = torch.einsum("tnh,snh->nts", queries, keys) * dim**-0.5
        weights = scores.masked_fill(distances >= (window or len(qkv)), -math.inf).softmax(-1)
        expected = torch.einsum("nts,snh->tnh", weights, values).flatten(1)
        assert_near(found, expected, 4 * qkv.double().abs().max())
        beside_nan = attend([torch.full_like(whole[0], math.nan), qkv, torch.full_like(whole[2], math.nan)])
        assert torch.equal(beside_nan[1 : 1 + len(qkv)], found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_int8_cache_keeps_zeros_and_values_that_are_not_finite(dtype: torch.dtype) -> None:
    """Values of one head are zeros. In two others, one value of the second token isn't finite."""
    step = {"seed": 0, "dtype": dtype, "has_scales": True, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
    step |= {"block_size": 16, "lengths": [3], "counts": [3], "window": 0, "has_norm": False}
    step |= {"offset": 0.0, "softcap": 0.0, "has_sinks": False}
    cache, qkv = Cache(step), randn(0, 3, 12 * 32).to(dtype)
    values = qkv[:, 8 * 32 :].view(3, 4, 32)
    values[:, 1] = 0
    values[1, 2, 5], values[1, 3, 5] = math.nan, math.inf
    out = cache.attend(qkv, [[1, 0, 3, 0]]).view(3, 4, 32)
    assert out[:, 0].isfinite().all()
    assert (out[:, 1] == 0).all()
    assert out[0].isfinite().all()
    assert out[1:, 2:].isnan().all()
    step["window"] = 1
    out = cache.attend(qkv, [[1, 0, 3, 0]]).view(3, 4, 32)
    assert out[[0, 2]].isfinite().all()


def attend_to_share(q: torch.Tensor, num_heads: int = 3, owner: int = 0) -> torch.Tensor:
    tables, sequences = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(0, 4, dtype=torch.int32)
    sizes = num_heads, 3, 2, 0, 1.0, 0.0
    return torch.ops.raycore.attend_to_owned_keys(q, torch.zeros(1, 2, 3, 4), tables, sequences, *sizes, 2, owner)


def mask(logits: torch.Tensor, rows: Sequence[float] = (0,)) -> None:
    """Applies one mask of 32 bits."""
    torch.ops.raycore.mask_logits(logits, torch.tensor(rows), torch.zeros(1, 4, dtype=torch.uint8))


def test_kernels_refuse_arguments_that_do_not_fit() -> None:
    x, none = torch.zeros(2, 6), torch.zeros(0)
    packed, odd = torch.ops.raycore.pack_linear(torch.zeros(9, 6)), torch.zeros(16, 5).bfloat16()
    for call, what in (
        (lambda: torch.ops.raycore.rms_norm(x, torch.zeros(5), EPS, 0.0), "a contiguous weight [D]"),
        (lambda: torch.ops.raycore.rms_norm(x, torch.zeros(6).bfloat16(), EPS, 0.0), "a weight of the dtype of x"),
        (
            lambda: torch.ops.raycore.rms_norm(x.double(), torch.zeros(6).double(), EPS, 0.0),
            "float32, bfloat16 or float16",
        ),
        (lambda: torch.ops.raycore.rms_norm(x[:, :0], none, EPS, 0.0), "x [T, D] with contiguous rows"),
        (lambda: torch.ops.raycore.gate_and_mul(x.t(), *SILU), "a contiguous gate_up [T, 2F]"),
        (lambda: torch.ops.raycore.gate_and_mul(x[:, :0], *SILU), "a contiguous gate_up [T, 2F]"),
        (lambda: torch.ops.raycore.gate_and_mul(x, 6, 0.0, 0.0), "a gate that they know"),
        (lambda: torch.ops.raycore.most_likely(x.t()), "logits [R, V] with contiguous rows"),
        (lambda: mask(x.double()), "float32, bfloat16 or float16"),
        (lambda: mask(x.bfloat16()), "logits [R, V] in float32 with contiguous rows"),
        (lambda: mask(x.t()), "logits [R, V] in float32 with contiguous rows"),
        (lambda: mask(x, rows=[2]), "rows of the logits"),
        (lambda: mask(x, rows=[-1]), "rows of the logits"),
        (lambda: mask(x, rows=[0.0]), "contiguous rows [M] in int64"),
        (lambda: mask(x, rows=[0, 1]), "contiguous masks [M, B] in uint8"),
        (lambda: mask(torch.zeros(2, 33)), "contiguous masks [M, B] in uint8"),
        (lambda: torch.ops.raycore.draw(x, torch.zeros(2, 5)), "contiguous limits [R, L] in float64"),
        (lambda: torch.ops.raycore.logprobs(x, torch.tensor([0, 6]), 1), "token ids of the vocabulary"),
        (lambda: torch.ops.raycore.logprobs(x, torch.tensor([0, -1]), 1), "token ids of the vocabulary"),
        (lambda: torch.ops.raycore.logprobs(x, torch.tensor([0, 1]), 7), "at most 64 of the most likely tokens"),
        (lambda: torch.ops.raycore.logprobs(x, torch.tensor([0.0, 1]), 1), "contiguous token ids [R] in int64"),
        (lambda: torch.ops.raycore.few_rows_linear(x, x[:, :4]), "a contiguous weight [O, I]"),
        (lambda: torch.ops.raycore.merge_parts(x, none, x), "contiguous parts [P, T, N, H + 2]"),
        (lambda: torch.ops.raycore.merge_parts(x.view(2, 1, 2, 3), x[0], x), "contiguous sinks [N] in float32"),
        (lambda: attend_to_share(x, owner=2), "an owner below the number of owners"),
        (lambda: attend_to_share(x, num_heads=2), "whole groups of query heads"),
        (lambda: torch.ops.raycore.pack_linear(x[:, :4]), "a contiguous weight [O, I]"),
        (lambda: torch.ops.raycore.pack_linear(x[:, :1].bfloat16()), "an even I for weights in bfloat16"),
        (lambda: torch.ops.raycore.panel_linear(x[:, :4], packed, none, 9), "x [R, I] with contiguous rows"),
        (lambda: torch.ops.raycore.panel_linear(x, packed, none, 17), "as many outputs as the packed weight has"),
        (lambda: torch.ops.raycore.panel_linear(x[:, :0], packed[:, :0], none, 9), "a packed weight with inputs"),
        (lambda: torch.ops.raycore.panel_linear(x[:, :5], odd, none, 16), "an even I for weights in bfloat16"),
        (
            lambda: torch.ops.raycore.head_linear(x[:, None, :5], odd[None], torch.zeros(2, 1, 16)),
            "an even I for weights in bfloat16",
        ),
        (lambda: torch.ops.raycore.panel_linear(x.bfloat16(), packed, none, 9), "a weight of the dtype of x"),
        (lambda: torch.ops.raycore.panel_linear(x, packed, x[0], 9), "a contiguous bias [O] of the dtype of x"),
        (lambda: torch.ops.raycore.gated_panel_linear(x, packed, none, *SILU), "a panel of gates for each panel"),
        (lambda: torch.ops.raycore.add_panel_linear(x, x[:1], packed, none), "a contiguous residual [R, O]"),
    ):
        with pytest.raises(RuntimeError, match=f"raycore's kernels expect .*{re.escape(what)}"):
            call()


def ints(*numbers: int | list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


ATTENTION = {
    "qkv": torch.zeros(4, 16),
    "norm": torch.zeros(3, 4),
    "eps": EPS,
    "norm_offset": 0.0,
    "turns": torch.zeros(8, 4),
    "cache": torch.zeros(6, 8),
    "tables": ints([0, 1], [2, 0], [0, 0]),
    "sequences": ints([1, 0, 3, 1], [0, 3, 1, 3]),
    "num_heads": 2,
    "num_kv_heads": 1,
    "block_size": 2,
    "window": 0,
    "scale": 0.5,
    "softcap": 0.0,
    "sinks": torch.zeros(2),
    "turns_are_of_rows": False,
    "ends": ints(2, 3, 4, 4),
}
LATENT_ATTENTION = {
    "qkv": torch.zeros(4, 18),
    "norm": torch.zeros(4),
    "eps": EPS,
    "turns": torch.zeros(8, 2),
    "cache": torch.zeros(3, 12),
    "tables": ints([0, 1], [2, 0], [0, 0]),
    "sequences": ints([1, 0, 3, 1], [0, 3, 1, 3]),
    "num_heads": 2,
    "block_size": 2,
    "scale": 0.5,
}
WRONG_STEPS = [
    ("sequences", ints([1, 0, 5, 1]), "sequences of rows of the step"),
    ("sequences", ints([1, 1, 2**31 - 1, 0]), "sequences of rows of the step"),
    ("sequences", ints([1, -1, 2, 0]), "sequences of rows of the step"),
    ("sequences", ints([1, 0, 1, -2]), "sequences of rows of the step"),
    ("sequences", ints([3, 0, 1, 0]), "slots of the block tables"),
    ("sequences", ints([-1, 0, 1, 0]), "slots of the block tables"),
    ("sequences", ints([1, 0, 3, 2]), "block tables as long as the sequences"),
    ("tables", ints([0, 1], [2, 3]), "blocks of the cache"),
    ("tables", ints([0, -1], [2, 1]), "blocks of the cache"),
    ("num_heads", 0, "heads"),
    ("block_size", 0, "block"),
]


@pytest.mark.parametrize(
    ("part", "wrong", "expected"),
    [
        *WRONG_STEPS,
        ("turns", torch.zeros(3, 4), "cosines and sines of all positions"),
        ("turns", torch.zeros(8, 8), "a contiguous qkv"),
        ("norm", torch.zeros(2, 4), "a contiguous norm [N + K, H]"),
        ("num_kv_heads", 0, "whole groups of query heads"),
        ("ends", ints(2, 3, 5, 4), "ends within the sequences"),
        ("ends", ints(0, 3, 4, 4), "ends within the sequences"),
        ("cache", torch.zeros(4, 8), "blocks of the cache"),
    ],
)
def test_steps_that_attention_would_follow_out_of_its_tensors_are_refused(
    part: str, wrong: object, expected: str
) -> None:
    torch.ops.raycore.attention(*ATTENTION.values())
    with pytest.raises(RuntimeError, match=f"raycore's kernels expect .*{re.escape(expected)}"):
        torch.ops.raycore.attention(*(ATTENTION | {part: wrong}).values())


@pytest.mark.parametrize(
    ("part", "wrong", "expected"),
    [
        *WRONG_STEPS,
        ("turns", torch.zeros(3, 2), "cosines and sines of all positions"),
        ("norm", torch.zeros(0), "latents"),
    ],
)
def test_steps_that_latent_attention_would_follow_out_of_its_tensors_are_refused(
    part: str, wrong: object, expected: str
) -> None:
    torch.ops.raycore.latent_attention(*LATENT_ATTENTION.values())
    with pytest.raises(RuntimeError, match=f"raycore's kernels expect .*{re.escape(expected)}"):
        torch.ops.raycore.latent_attention(*(LATENT_ATTENTION | {part: wrong}).values())


@pytest.mark.parametrize(
    ("sequence", "num_turns", "expected"),
    [
        ([0, 1, 4, 0], 8, "sequences of rows of the step"),
        ([0, 0, 3, 1], 8, "sequences from their first token on"),
        ([0, 0, 4, 0], 3, "cosines and sines of all positions"),
    ],
)
def test_two_sided_attention_refuses_sequences_without_rows_or_turns(
    sequence: list[int], num_turns: int, expected: str
) -> None:
    with pytest.raises(RuntimeError, match=f"raycore's kernels expect {expected}"):
        torch.ops.raycore.two_sided_attention(torch.zeros(4, 12), torch.zeros(num_turns, 4), ints(sequence), 1, 0, 1.0)


def test_parts_of_a_step_without_tokens_are_merged() -> None:
    merged = torch.ops.raycore.merge_parts(torch.zeros(2, 0, 3, 6), torch.zeros(3), torch.zeros(0).bfloat16())
    assert (merged.shape, merged.dtype) == ((0, 12), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize(("block_size", "window"), [(16, 9), (16, 30), (48, 20), (32, 20), (24, 5)])
def test_blocks_before_the_window_may_be_those_of_a_sequence_with_nan(
    dtype: torch.dtype, has_scales: bool, block_size: int, window: int
) -> None:
    """A slot gives them back, so that others get them, but its table keeps their numbers."""
    step = {"seed": 0, "dtype": dtype, "has_scales": has_scales, "num_heads": 12, "num_kv_heads": 1, "head_dim": 32}
    step |= {"block_size": block_size, "window": window, "has_norm": False, "offset": 0.0, "softcap": 0.0}
    for length in (60, 65):
        step |= {"lengths": [length], "has_sinks": False}
        for count in (1, 9):
            cache, qkv = Cache(step), randn(length, length, 14 * 32).to(dtype)
            start = length - count
            cache.attend(qkv[:start].clone(), [[1, 0, start, 0]])
            expected = cache.attend(qkv[start:].clone(), [[1, 0, count, start]])
            others = cache.cache[cache.tables[1, : (start - window + 1) // block_size].long()]
            others = torch.full_like(others.view(torch.float32), math.nan).view(others.dtype)
            cache.cache[cache.tables[1, : len(others)].long()] = others
            assert torch.equal(cache.attend(qkv[start:].clone(), [[1, 0, count, start]]), expected)
            assert expected.isfinite().all()


def recurrence_by(name: str) -> Make:
    """Makes implementations with the kernels of this instruction set."""

    def make(shape):
        kernels = NativeDelta(shape) if name == "gated_delta" else NativeMamba2(shape)
        kernels._compute = getattr(ops, name)
        return kernels

    return make


RECURRENCES = pytest.mark.parametrize(("rule", "name"), [(DELTA, "gated_delta"), (MAMBA2, "mamba2")])


@RECURRENCES
@hypothesis.settings(max_examples=20)
@hypothesis.given(data=strategies.data())
def test_recurrences_equal_the_definition(rule: Rule, name: str, data: strategies.DataObject) -> None:
    batch = Batch(data.draw(sizes(rule, [torch.float32, torch.bfloat16, torch.float16], longest=80, largest_dim=256)))
    batch.check(batch.outcome(recurrence_by(name)))


@RECURRENCES
def test_the_bits_of_recurrences_do_not_depend_on_the_number_of_threads(rule: Rule, name: str) -> None:
    batch = Batch(Sizes(rule, twice(MIXED), num_k_heads=2, group=2, k_dim=32, v_dim=80))
    outcomes: list[Outcome] = []
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        outcomes.append(batch.outcome(recurrence_by(name)))
    torch.set_num_threads(1)
    one, three = outcomes
    assert torch.equal(one.out_TX, three.out_TX)
    assert torch.equal(one.states_RNKH.nan_to_num(9.0), three.states_RNKH.nan_to_num(9.0))
    assert torch.equal(one.conv_states_RCW.nan_to_num(9.0), three.conv_states_RCW.nan_to_num(9.0))


@pytest.mark.parametrize(
    ("part", "shape", "expected"),
    [
        ("conv_states", (7, 80, 4), "2 to 4 taps"),
        ("states", (7, 2, 272, 16), "at most 256"),
        ("states", (7, 3, 16, 16), "a convolution of the channels"),
    ],
)
def test_wrong_shapes_of_states_are_refused(part: str, shape: tuple[int, ...], expected: str) -> None:
    if isinstance(ops, EmulatedOps):
        pytest.skip("checks nothing")
    batch = Batch(Sizes(DELTA, num_k_heads=1, group=2))
    found = {"conv_states": batch.layer.conv_states_RCW, "states": batch.layer.states_RNKH, part: torch.zeros(shape)}
    rows = len(found[part])
    found = {name: tensor if name == part else torch.zeros(rows, *tensor.shape[1:]) for name, tensor in found.items()}
    layer = batch.layer
    nothing, saves = torch.empty(0), torch.zeros(0, 3, dtype=torch.int32)
    sequences = torch.tensor([[0, 1, -1, 0]], dtype=torch.int32)
    heads = layer.decay_N, layer.bias_N, nothing
    with pytest.raises(RuntimeError, match=expected):
        ops.gated_delta(batch.x_TX, layer.conv_CW, nothing, *heads, *found.values(), sequences, saves, 1)


def test_rows_beyond_the_states_are_refused() -> None:
    if isinstance(ops, EmulatedOps):
        pytest.skip("checks nothing")
    batch = Batch(Sizes(DELTA, num_k_heads=1, group=2))
    batch.step.sequences_n4[0, 3] = len(batch.layer.states_RNKH)
    with pytest.raises(RuntimeError, match="rows of the states"):
        batch.outcome(recurrence_by("gated_delta"))


@pytest.mark.parametrize(
    ("sequence", "save", "expected"),
    [
        ([1, 2**31 - 1, -1, 0], [0, 1, 1], "sequences of tokens of x"),
        ([0, 2, -1, 0], [0, 3, 1], "saves after some tokens"),
        ([0, 2, -1, 0], [0, -1, 1], "saves after some tokens"),
    ],
)
def test_recurrences_of_tokens_that_x_lacks_are_refused(sequence: list[int], save: list[int], expected: str) -> None:
    states, conv_states, numbers = torch.zeros(2, 1, 4, 4), torch.zeros(2, 12, 1), torch.zeros(1)
    parts = torch.zeros(12, 2), numbers[:0], numbers, numbers, numbers[:0], conv_states, states
    with pytest.raises(RuntimeError, match=f"raycore's kernels expect {expected}"):
        torch.ops.raycore.gated_delta(torch.zeros(2, 14), *parts, ints(sequence), ints(save), 1)
