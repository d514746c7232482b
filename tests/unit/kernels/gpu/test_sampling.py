"""Picking tokens: Triton's kernels, those for CPUs, and plain torch against slow references in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from interpreted_triton import DEVICE
from native_kernels import needs_kernels, randn

from raycore.kernels import library
from raycore.kernels.gpu import sampling
from raycore.parts.constraints.grammar.matcher import mask_bytes
from raycore.sampling import keyed_random, picking
from raycore.sampling.gpu import GpuSampling
from raycore.sampling.kernels import SamplingKernels
from raycore.sampling.native import NativeSampling

DTYPES = strategies.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = strategies.integers(0, 1 << 32)
UNIFORM = strategies.floats(0, 1, exclude_max=True)
SETTINGS = hypothesis.settings(max_examples=25)

Draw = Callable[[torch.Tensor, torch.Tensor], list[int]]


def triton_draw(logits_RV: torch.Tensor, limits_RL: torch.Tensor) -> list[int]:
    return sampling.draw(logits_RV.to(DEVICE), limits_RL.to(DEVICE)).tolist()


def native_draw(logits_RV: torch.Tensor, limits_RL: torch.Tensor) -> list[int]:
    return torch.ops.raycore.draw(logits_RV, limits_RL).tolist()


def torch_draw(logits_RV: torch.Tensor, limits_RL: torch.Tensor) -> list[int]:
    columns = dict(zip(picking.DrawLimits._fields, limits_RL.numpy().T, strict=True))
    return picking.draw(logits_RV.to(DEVICE), draw_limits(**columns)).tolist()


def draw_limits(*, temperature_R, min_p_R, top_k_R, top_p_R, uniform_R) -> picking.DrawLimits:
    """Limits of the types that the sampler gives them."""
    return picking.DrawLimits(
        temperature_R=np.asarray(temperature_R, np.float32),
        min_p_R=np.asarray(min_p_R, np.float32),
        top_k_R=np.asarray(top_k_R, np.int64),
        top_p_R=np.asarray(top_p_R, np.float64),
        uniform_R=np.asarray(uniform_R, np.float64),
    )


def triton_most_likely(logits_RV: torch.Tensor) -> list[int]:
    return sampling.most_likely(logits_RV.to(DEVICE)).tolist()


def native_most_likely(logits_RV: torch.Tensor) -> list[int]:
    return torch.ops.raycore.most_likely(logits_RV).tolist()


def torch_most_likely(logits_RV: torch.Tensor) -> list[int]:
    return picking.most_likely(logits_RV.to(DEVICE)).tolist()


def kernels_on_device() -> list[SamplingKernels]:
    """Triton's, those for CPUs, and plain torch."""
    native = [NativeSampling()] if HAS_NATIVE else []
    return [GpuSampling(DEVICE), *native, SamplingKernels(DEVICE)]


HAS_NATIVE = library.load() is not None
DRAWS = pytest.mark.parametrize("draw", [triton_draw, pytest.param(native_draw, marks=needs_kernels), torch_draw])
MOST_LIKELY = pytest.mark.parametrize(
    "most_likely", [triton_most_likely, pytest.param(native_most_likely, marks=needs_kernels), torch_most_likely]
)


@SETTINGS
@hypothesis.given(
    seed=SEEDS,
    rows=strategies.sets(strategies.integers(0, 19)).map(sorted),
    vocab_size=strategies.integers(1, 300) | strategies.sampled_from([4096, 4097]),
)
def test_masks_forbid_tokens_and_keep_the_bits_of_all_others(seed: int, rows: list[int], vocab_size: int) -> None:
    rng = np.random.default_rng(seed)
    logits_RV = torch.as_tensor(rng.integers(0, 1 << 32, (20, vocab_size), np.uint32).view(np.float32))
    masks_MB = rng.integers(0, 256, (len(rows), mask_bytes(vocab_size)), np.uint8)
    expected_RV = logits_RV.clone()
    is_allowed = np.unpackbits(masks_MB, axis=1, count=vocab_size, bitorder="little").astype(bool)
    expected_RV[rows] = expected_RV[rows].masked_fill(torch.as_tensor(~is_allowed), -math.inf)
    for kernels in kernels_on_device():
        found_RV = logits_RV.to(kernels.device, copy=True)
        kernels.mask(found_RV, np.array(rows, np.int64), masks_MB)
        assert torch.equal(found_RV.cpu().view(torch.int32), expected_RV.view(torch.int32)), type(kernels)


@MOST_LIKELY
@SETTINGS
@hypothesis.given(
    dtype=DTYPES,
    seed=SEEDS,
    num_rows=strategies.integers(0, 3),
    vocab_size=strategies.integers(1, 300) | strategies.sampled_from([4096, 4097, 9000]),
)
def test_most_likely_takes_the_first_of_the_largest_logits(
    most_likely, dtype, seed: int, num_rows: int, vocab_size: int
) -> None:
    logits_RV = (randn(seed, num_rows, vocab_size) * 2).round().to(dtype)  # few different values
    expected = [row.index(max(row)) for row in logits_RV.tolist()]
    assert most_likely(logits_RV) == expected
    if most_likely is not torch_most_likely:
        assert most_likely(torch.cat([logits_RV, logits_RV + 9], 1)[:, :vocab_size]) == expected


def test_most_likely_takes_nan_for_the_smallest_logit() -> None:
    inf, nan = math.inf, math.nan
    logits_RV = torch.tensor([[nan, -inf, 1.0, nan, 1.0], [nan, nan, nan, nan, -5.0], [-inf] * 4 + [inf], [-inf] * 5])
    assert triton_most_likely(logits_RV) == [2, 4, 4, 0]
    assert 0 <= triton_most_likely(torch.full((1, 5000), nan))[0] < 5000


def drawn(logits_V: torch.Tensor, limits: list[float], min_p_off: float, top_off: float, off: float) -> int:
    """What a row draws, in float64. The last arguments move boundaries: the least weights, and the shares of sums."""
    temperature, min_p, top_k, top_p, uniform = limits
    logits_V = logits_V.double()
    weights_V = ((logits_V - logits_V.max()) / float(np.float32(temperature))).exp()
    weights_V[weights_V < min(float(np.float32(min_p)) * (1 + min_p_off), 1.0)] = 0
    kept_K = weights_V.sort(descending=True).values[: int(top_k)]
    if top_p < 1:
        sums_K = kept_K.cumsum(0)
        kept_K = kept_K[: int((sums_K < min(top_p + off, 1.0) * sums_K[-1]).sum()) + 1]
    weights_V[weights_V < kept_K[-1] * (1 - top_off)] = 0
    sums_V = weights_V.cumsum(0)
    share = min(max(1 - uniform + off, 1e-300), 1.0)
    return int((sums_V < share * sums_V[-1]).sum())


def possible(logits_V: torch.Tensor, limits: list[float]) -> tuple[int, int]:
    """The first and the last token that a row may draw if float32 decides what lies within 1e-6 of a boundary.

    Tokens as likely as the last one that is kept are never on a boundary: they are kept. Only the rounding of
    different weights can make them equal.
    """
    found = [
        drawn(logits_V, limits, min_p_off, top_off, off)
        for min_p_off, top_off, off in itertools.product((-1e-6, 0.0, 1e-6), (0.0, 1e-6), (-1e-6, 0.0, 1e-6))
    ]
    return min(found), max(found)


@SETTINGS
@hypothesis.given(
    dtype=DTYPES,
    seed=SEEDS,
    vocab_size=strategies.integers(1, 700),
    temperature=strategies.sampled_from([0.3, 1.0, 5.0]),
    min_p=strategies.just(0.0) | strategies.floats(0, 1),
    top_k=strategies.none() | strategies.integers(1, 20) | strategies.integers(1, 700),
    top_p=strategies.just(1.0) | strategies.floats(0.01, 1),
    uniforms=strategies.lists(UNIFORM, min_size=2, max_size=2),
    has_ties=strategies.booleans(),
)
def test_torch_native_and_triton_draw_the_same_token(
    dtype,
    seed: int,
    vocab_size: int,
    temperature: float,
    min_p: float,
    top_k: int | None,
    top_p: float,
    uniforms,
    has_ties,
) -> None:
    """The token that float64 draws, except where rounding decides. One of the rows has no top-k."""
    logits_RV = randn(seed, 2, vocab_size) * 3
    logits_RV = ((logits_RV.round() if has_ties else logits_RV) * temperature).to(dtype)
    top_k = min(top_k or vocab_size, vocab_size)
    limits = [[temperature, min_p, k, top_p, u] for k, u in zip((top_k, vocab_size), uniforms, strict=True)]
    limits_RL = torch.tensor(limits, dtype=torch.float64)
    expected = [possible(row, own) for row, own in zip(logits_RV, limits, strict=True)]
    for draw in (triton_draw, torch_draw) + (native_draw,) * HAS_NATIVE:
        for token, (first, last) in zip(draw(logits_RV, limits_RL), expected, strict=True):
            assert first <= token <= last, draw.__name__


@DRAWS
def test_draws_at_the_ends_of_the_unit_interval_take_a_kept_token(draw: Draw) -> None:
    inf = math.inf

    def draw_one(logits: list[float], *limits: float) -> int:
        return draw(torch.tensor([logits]), torch.tensor([limits], dtype=torch.float64))[0]

    logits = [-inf, 3.0, -inf, 3.0, 1.0, -inf]
    for uniform, expected in ((0.0, 3), (0.49, 3), (0.51, 1), (1 - 2**-53, 1)):
        for limits in ([1e-37, 0, 6, 1.0], [1.0, 0, 2, 1.0], [1.0, 1.0, 6, 1.0], [1.0, 0, 1, 1.0], [1.0, 0, 6, 0.01]):
            assert draw_one(logits, *limits, uniform) == expected  # equally likely tokens are kept together
    assert draw_one(logits, 1.0, 0, 6, 1.0, 0.0) == 4  # no token of weight 0
    assert draw_one(logits, 1.0, 0, 5, 1.0, 0.0) == 4  # top-k is more than there are
    assert draw_one([5.0], 1.0, 0, 1, 1.0, 0.3) == 0
    half = math.log(0.5)
    assert draw_one([0.0, 0.0, half, half, half], 1.0, 0, 3, 0.8, 0.0) == 1  # 0.8 of 2.5, without the other ties
    assert draw_one([0.0, 0.0, half, half, half], 1.0, 0, 3, 0.81, 0.0) == 4


@needs_kernels
def test_limits_have_the_same_columns_in_python_cpp_and_triton() -> None:
    columns = [name.removesuffix("_R") for name in picking.DrawLimits._fields]
    assert list(sampling.LIMITS) == columns
    for num_columns in (len(columns) - 1, len(columns) + 1):
        limits_RL = torch.ones(1, num_columns, dtype=torch.float64)
        with pytest.raises(RuntimeError, match=f"columns {' '.join(columns)}$"):
            native_draw(torch.zeros(1, 4), limits_RL)
        with pytest.raises(AssertionError, match=f"limits are {', '.join(columns)}$"):
            triton_draw(torch.zeros(1, 4), limits_RL)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 3),
        ({"temperature_R": 0.1}, 1),
        ({"min_p_R": 0.4}, 2),
        ({"top_k_R": 1}, 0),
        ({"top_p_R": 0.85}, 2),
        ({"uniform_R": 0.5}, 1),
    ],
)
def test_each_limit_is_read_from_its_own_column(changed: dict[str, float], expected: int) -> None:
    """From the probabilities 0.4, 0.3, 0.2 and 0.1, a draw without limits takes the last token."""
    given = {"temperature_R": 1, "min_p_R": 0, "top_k_R": 4, "top_p_R": 1, "uniform_R": 0.05} | changed
    limits = draw_limits(**{name: [value] for name, value in given.items()})
    logits_RV = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert picking.draw(logits_RV, limits).tolist() == [expected]
    for draw in (triton_draw,) + (native_draw,) * HAS_NATIVE:
        assert draw(logits_RV, torch.as_tensor(limits.matrix())) == [expected], draw.__name__


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
def test_infinite_and_missing_logits_still_draw_a_token() -> None:
    inf, nan = math.inf, math.nan
    limits_RL = torch.tensor([[1.0, 0.0, k, p, 0.3] for k, p in ((5, 1.0), (2, 1.0), (5, 0.9), (2, 0.9))]).double()
    for logits, expected in (([nan] * 5, range(5)), ([-inf] * 5, range(5)), ([0.0, inf, nan, -inf, 0.0], [1])):
        assert set(triton_draw(torch.tensor([logits] * 4), limits_RL)) <= set(expected)
    assert triton_draw(torch.zeros(0, 5), limits_RL[:0]) == []


@pytest.mark.parametrize("spread", [0.0, 0.2, 3.0])
def test_triton_draws_from_large_vocabularies_by_the_formula(spread: float) -> None:
    """Rows of several pieces. With a small spread, there are many candidates."""
    vocab_size = 9000
    logits_V = randn(5, vocab_size) * spread
    for limits in ([0.7, 0.0, vocab_size, 0.9, 0.4], [1.0, 1e-3, 5000, 0.95, 0.2], [1.0, 0.0, 20, 1.0, 0.8]):
        token = triton_draw(logits_V[None], torch.tensor([limits], dtype=torch.float64))[0]
        first, last = possible(logits_V, limits)
        assert first <= token <= last


@hypothesis.settings(max_examples=2)
@hypothesis.given(SEEDS, UNIFORM)
def test_triton_draws_the_same_token_for_a_row_in_any_batch(seed: int, uniform: float) -> None:
    logits_RV = (randn(seed, 4, 2 * 4200) * 2).bfloat16()[:, :4200]
    limits_RL = torch.tensor([[0.8, 0.0, k, p, uniform] for k in (40, 4200) for p in (0.9, 1.0)], dtype=torch.float64)
    together = triton_draw(logits_RV, limits_RL)
    assert triton_draw(logits_RV.flip(0), limits_RL.flip(0)) == together[::-1]
    assert [triton_draw(logits_RV[i : i + 1], limits_RL[i : i + 1])[0] for i in range(4)] == together


@SETTINGS
@hypothesis.given(
    seeds=strategies.lists(strategies.integers(), min_size=0, max_size=300),
    start=strategies.integers(0, 1 << 30) | strategies.integers(0, 1 << 62),
    dtype=strategies.sampled_from([torch.int64, torch.int32]),
)
def test_keyed_uniform_has_the_bits_of_numpys(seeds: list[int], start: int, dtype: torch.dtype) -> None:
    keys = [keyed_random.stream_key(seed) for seed in seeds]
    state_R, gamma_R = (np.array([key[i] for key in keys], dtype=np.uint64) for i in range(2))
    positions_R = (start + torch.arange(len(seeds))).to(dtype).abs()
    arguments = (torch.tensor(state_R.view(np.int64)), torch.tensor(gamma_R.view(np.int64)), positions_R)
    found = sampling.keyed_uniform(*(x.to(DEVICE) for x in arguments))
    assert found.tolist() == keyed_random.uniform(state_R, gamma_R, positions_R.numpy()).tolist()
