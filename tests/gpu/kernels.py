"""Checks of `benchmarks/gpu.py`: raycore's Triton kernels against formulas, with the sizes of real models.

The formulas are computed on the device in float32 or float64. Shape suffixes are those of the kernels' modules.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu.checks import Checks
from raycore.kernels.gpu import experts, linear, rows, sampling
from raycore.kernels.gpu.attention import LayerCache, PagedAttention, TokenLocations, chunk_tiles
from raycore.layers import fp8_linear
from raycore.layers.gate import gate_and_mul
from raycore.models.spec import ClampedSwiglu, Gate
from raycore.parts.experts.models import ExpertChoice
from raycore.sampling import keyed_random, picking

EPS = 1e-6
BLOCK_SIZE = 16
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-8}
"""The largest error relative to the size of the numbers that are added up."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors that kernels are checked with."""

    dtype: torch.dtype = torch.bfloat16
    num_tokens: int = 1000
    dim: int = 4096
    inner: int = 12288
    vocab_size: int = 151_936
    num_rows: int = 64
    num_experts: int = 128
    per_token: int = 8
    expert_dim: int = 768
    head_dims: tuple[int, ...] = (64, 128)
    num_kv_heads: int = 8
    group: int = 4
    contexts: tuple[int, ...] = (1, 15, 16, 17, 512, 4095, 8191)
    """The positions of the tokens of decodes."""
    chunks: tuple[tuple[int, int], ...] = ((0, 1000), (777, 300), (3000, 65))
    """The position of the first token, and the number of tokens, of chunks."""


def check_kernels(checks: Checks, sizes: Sizes | None = None) -> None:
    """Compare every kernel with its formula."""
    sizes = sizes or Sizes()
    device = torch.device(checks.device)
    for name, check in (
        ("rms_norm", _check_norms),
        ("gate_and_mul", _check_gates),
        ("batch_invariant_linear", _check_linear),
        ("route, apply_experts", _check_experts),
        ("mask", _check_mask),
        ("most_likely", _check_most_likely),
        ("draw", _check_draw),
        ("keyed_uniform", _check_uniform),
    ):
        checks.run(f"kernels: {name}", functools.partial(check, sizes, device))
    cases = [(window, has_norm, sizes.dtype) for window in (None, 100) for has_norm in (False, True)]
    if device.type == "cpu" or fp8_linear.why_no_fp8(device) is None:
        cases.append((None, False, torch.float8_e4m3fn))
    for head_dim in sizes.head_dims:
        for window, has_norm, cache_dtype in cases:
            name = f"head_dim {head_dim}, window {window}{', norms' if has_norm else ''}, cache {cache_dtype}"
            attention = functools.partial(_AttentionCase, sizes, device, head_dim, window, has_norm, cache_dtype)
            checks.run(f"kernels: attention, {name}", lambda attention=attention: attention().check())


def randn(seed: int, device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers, the same for every run on the same device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def near(found: Tensor, expected: Tensor, scale: float = 0.0) -> tuple[bool, str]:
    """Compare with a tolerance of one rounding. `scale`: the size of the numbers that are added up, if it is larger.

    They are added up in float32, so a small sum has the error of the large ones.
    """
    largest = float(expected.abs().max())
    allowed = ROUNDING[found.dtype] * expected.abs().clamp(min=scale) + ROUNDING[torch.float32] * max(1.0, largest)
    worst = float(((found.double() - expected).abs() / allowed).max())
    return worst <= 1, f"largest error {worst:.2f} of what is allowed"


def both(*results: tuple[bool, str]) -> tuple[bool, str]:
    """Whether all have passed, and the figures of all."""
    return all(is_ok for is_ok, _ in results), "; ".join(figures for _, figures in results)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def _check_norms(sizes: Sizes, device: torch.device) -> tuple[bool, str]:
    x_TD = randn(0, device, sizes.dtype, sizes.num_tokens, sizes.dim)
    weight_D = randn(2, device, sizes.dtype, sizes.dim)
    return near(rows.rms_norm(x_TD, weight_D, EPS), _norm(x_TD, weight_D))


def _check_gates(sizes: Sizes, device: torch.device) -> tuple[bool, str]:
    x_TF = randn(0, device, sizes.dtype, sizes.num_tokens, 2 * sizes.inner) * 5
    gates: tuple[Gate, ...] = "silu", "gelu", "gelu_tanh", "relu2", ClampedSwiglu(1.7, 3.0)
    return both(*(near(rows.gate_and_mul(each, x_TF), gate_and_mul(each, x_TF.double())) for each in gates))


def _check_linear(sizes: Sizes, device: torch.device) -> tuple[bool, str]:
    x_TI = randn(0, device, sizes.dtype, sizes.num_tokens, sizes.dim)
    weight_OI = randn(1, device, sizes.dtype, sizes.dim, sizes.dim) / sizes.dim**0.5
    bias_O = randn(2, device, sizes.dtype, sizes.dim)
    residual_TO = randn(3, device, sizes.dtype, sizes.num_tokens, sizes.dim)
    product_TO = x_TI.double() @ weight_OI.double().t()
    found_TO = linear.batch_invariant_linear(x_TI, weight_OI)
    alone_TO = torch.cat([linear.batch_invariant_linear(x_TI[row : row + 1], weight_OI) for row in (0, 7, 11)])
    sum_TO = linear.batch_invariant_linear(x_TI, weight_OI, bias_O, residual_TO.clone())
    has_same_bits = torch.equal(alone_TO, found_TO[[0, 7, 11]])
    return both(
        near(found_TO, product_TO, 0.1),
        near(sum_TO, product_TO + bias_O.double() + residual_TO.double(), 0.1),
        (has_same_bits, f"rows alone have {'the same' if has_same_bits else 'other'} bits"),
    )


def _check_experts(sizes: Sizes, device: torch.device) -> tuple[bool, str]:
    dim, num_experts = sizes.dim // 2, sizes.num_experts
    gate_up_EFD = randn(0, device, sizes.dtype, num_experts, 2 * sizes.expert_dim, dim) / dim**0.5
    down_EDF = randn(1, device, sizes.dtype, num_experts, dim, sizes.expert_dim) / sizes.expert_dim**0.5
    results: list[tuple[bool, str]] = []
    for num_tokens in (1, sizes.num_rows, sizes.num_tokens):
        x_ND = randn(2, device, sizes.dtype, num_tokens, dim)
        router_logits_NE = randn(3, device, torch.float32, num_tokens, num_experts)
        weights_NK, ids_NK = experts.route(
            router_logits_NE, sizes.per_token, ExpertChoice(is_normalized=True), sizes.dtype
        )
        likely = router_logits_NE.double().softmax(-1).topk(sizes.per_token)
        expected_NK = likely.values / likely.values.sum(-1, keepdim=True)
        # float32 may order two almost equal probabilities differently
        num_routed = int((ids_NK == likely.indices).all(-1).sum())
        is_routed = num_routed >= 0.998 * num_tokens
        found_ND = experts.apply_experts(x_ND, weights_NK, ids_NK, gate_up_EFD, down_EDF, 0)
        expected_ND = torch.zeros_like(x_ND, dtype=torch.float64)
        for expert in range(num_experts):
            tokens, choices = (ids_NK == expert).nonzero(as_tuple=True)
            gate, up = (x_ND[tokens].double() @ gate_up_EFD[expert].double().t()).chunk(2, 1)
            hidden = (gate * gate.sigmoid() * up).to(sizes.dtype).double()
            weights = weights_NK[tokens, choices].double()
            expected_ND.index_add_(0, tokens, hidden @ down_EDF[expert].double().t() * weights[:, None])
        # a hidden number may be rounded to its other neighbor
        scale = 2 * max(1.0, float(expected_ND.abs().max()))
        results += [
            (is_routed, f"{num_routed} of {num_tokens} tokens routed"),
            near(weights_NK, expected_NK),
            near(found_ND, expected_ND, scale),
        ]
    return both(*results)


def _check_mask(sizes: Sizes, device: torch.device) -> tuple[bool, str]:
    rng, logits_RV = np.random.default_rng(0), randn(0, device, torch.float32, sizes.num_rows, sizes.vocab_size)
    is_allowed_MV = rng.random((sizes.num_rows - 1, -(-sizes.vocab_size // 32) * 32)) < 0.3
    masks_MB = torch.as_tensor(np.packbits(is_allowed_MV, axis=1, bitorder="little")).to(device)
    expected_RV = logits_RV.cpu().numpy().copy()
    expected_RV[1:][~is_allowed_MV[:, : sizes.vocab_size]] = -math.inf
    sampling.mask(logits_RV, torch.arange(1, sizes.num_rows, device=device), masks_MB)
    num_equal = int((logits_RV.cpu().numpy() == expected_RV).all(1).sum())
    return num_equal == sizes.num_rows, f"{num_equal} of {sizes.num_rows} rows"


def _check_most_likely(sizes: Sizes, device: torch.device) -> tuple[bool, str]:
    logits_RV = randn(0, device, sizes.dtype, sizes.num_rows, sizes.vocab_size)
    found_R, expected_R = sampling.most_likely(logits_RV).cpu(), logits_RV.cpu().float().numpy().argmax(-1)
    num_equal = int((found_R.numpy() == expected_R).sum())
    return num_equal == sizes.num_rows, f"{num_equal} of {sizes.num_rows} rows"


def _check_draw(sizes: Sizes, device: torch.device) -> tuple[bool, str]:
    """A row may draw another token than plain torch on the CPU if its random number is next to a boundary."""
    rng, num_rows, vocab_size = np.random.default_rng(0), sizes.num_rows, sizes.vocab_size
    logits_RV = randn(1, device, torch.float32, num_rows, vocab_size) * 2
    kinds = np.arange(num_rows) % 4
    limits = picking.DrawLimits(
        temperature_R=rng.uniform(0.5, 1.5, num_rows).astype(np.float32),
        min_p_R=np.where(kinds == 1, 0.01, 0).astype(np.float32),
        top_k_R=np.where(kinds == 2, 50, vocab_size),
        top_p_R=np.where(kinds == 3, 0.9, 1.0),
        uniform_R=rng.random(num_rows),
    )
    expected_R = picking.draw(logits_RV.cpu(), limits)
    limits_RL = torch.as_tensor(limits.matrix()).to(device)
    num_equal = int((sampling.draw(logits_RV, limits_RL).cpu() == expected_R).sum())
    return num_equal >= 0.95 * num_rows, f"{num_equal} of {num_rows} rows draw what the CPU draws"


def _check_uniform(sizes: Sizes, device: torch.device) -> tuple[bool, str]:
    rng, count = np.random.default_rng(0), 100 * sizes.num_rows
    state_R, gamma_R = rng.integers(0, 1 << 64, (2, count), dtype=np.uint64)
    positions_R = rng.integers(0, 1 << 20, count)
    expected_R = keyed_random.uniform(state_R, gamma_R, positions_R)
    on_device = [torch.as_tensor(each.view(np.int64)).to(device) for each in (state_R, gamma_R, positions_R)]
    num_equal = int((sampling.keyed_uniform(*on_device).cpu().numpy() == expected_R).sum())
    return num_equal == count, f"{num_equal} of {count} numbers"


class PagedSequences:
    """Decodes and chunks of prompts, in a cache with permuted blocks."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.each = [(position, 1) for position in sizes.contexts] + list(sizes.chunks)
        """The position of the first token, and the number of tokens."""
        self.num_decodes = len(sizes.contexts)
        ends = [start + count for start, count in self.each]
        self.max_len = max(ends)
        blocks_each = -(-self.max_len // BLOCK_SIZE)
        order = np.random.default_rng(0).permutation(len(ends) * blocks_each).reshape(len(ends), -1)
        self.num_blocks = order.size
        self.tables_SM = torch.as_tensor(order.astype(np.int32)).to(device)
        slots = np.repeat(np.arange(len(ends)), [count for _, count in self.each])
        positions = np.concatenate([np.arange(start, start + count) for start, count in self.each])
        self.slots_T = torch.as_tensor(slots.astype(np.int32)).to(device)
        self.positions_T = torch.as_tensor(positions).to(device)

    @property
    def locations(self) -> TokenLocations:
        """Those of all tokens."""
        return TokenLocations(self.slots_T, self.positions_T, self.tables_SM)

    def turns(self, seed: int, rotated_dim: int) -> Tensor:
        """float32[P, rotated_dim]: random cosines and sines of each position."""
        angles_PC = randn(seed, self.slots_T.device, torch.float32, self.max_len, rotated_dim // 2) * 3
        return torch.stack([angles_PC.cos(), angles_PC.sin()], -1).flatten(1)

    def tiles(self, tile_rows: int) -> Tensor:
        """The tiles of chunks."""
        starts, counts = (np.array(numbers) for numbers in zip(*self.each, strict=True))
        chunks = slice(self.num_decodes, None)
        first_rows = np.cumsum(counts) - counts
        slots = np.arange(len(counts))
        tiles_I4 = chunk_tiles(slots[chunks], first_rows[chunks], counts[chunks], starts[chunks], tile_rows)
        return torch.as_tensor(tiles_I4).to(self.slots_T.device)


class _AttentionCase:
    """Decodes and chunks of prompts of one layer, in a cache with permuted blocks. Suffix L: a sequence's tokens."""

    def __init__(
        self,
        sizes: Sizes,
        device: torch.device,
        head_dim: int,
        window: int | None,
        has_norm: bool,
        cache_dtype: torch.dtype,
    ) -> None:
        self.sizes, self.head_dim, self.window = sizes, head_dim, window
        self.num_heads = sizes.num_kv_heads * sizes.group
        self.paged = paged = PagedSequences(sizes, device)
        width = self.num_heads + 2 * sizes.num_kv_heads
        self.qkv_TO = randn(0, device, sizes.dtype, len(paged.slots_T), width * head_dim)
        blocks = randn(1, device, sizes.dtype, paged.num_blocks * 2 * sizes.num_kv_heads, BLOCK_SIZE * head_dim)
        num_turned = self.num_heads + sizes.num_kv_heads
        norm_NH = randn(2, device, sizes.dtype, num_turned, head_dim) if has_norm else None
        self.turns_PH = paged.turns(3, head_dim)
        self.layer = LayerCache(blocks.to(cache_dtype), self.turns_PH, window, norm_NH)
        self.kernels = PagedAttention(
            num_heads=self.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=head_dim,
            block_size=BLOCK_SIZE,
            device=device,
            scale=1 / math.sqrt(head_dim),
            norm_eps=EPS,
            dtype=sizes.dtype,
            max_rows=paged.num_decodes,
        )

    def check(self) -> tuple[bool, str]:
        """Compare the cache, decodes of both kinds, and chunks with the formula."""
        out_TX = torch.full((len(self.qkv_TO), self.num_heads * self.head_dim), math.nan).to(self.qkv_TO)
        expected_TNH = self._turned()
        paged, decodes = self.paged, slice(self.paged.num_decodes)
        locations = paged.locations.part(0, paged.num_decodes)
        fused_BX = out_TX[decodes].clone()
        self.kernels.attend_tokens(self.layer, self.qkv_TO[decodes].clone(), locations, fused_BX, is_fused=True)
        self.kernels.write_cache(self.layer, self.qkv_TO, paged.locations)
        self.kernels.attend_tokens(self.layer, self.qkv_TO[decodes], locations, out_TX[decodes], is_fused=False)
        self.kernels.attend_chunks(
            self.layer, self.qkv_TO, paged.tiles(self.kernels.tile_rows), paged.tables_SM, out_TX
        )
        heads_TNH = self.qkv_TO.unflatten(1, (-1, self.head_dim))
        num_turned = self.num_heads + self.sizes.num_kv_heads
        formula_TX = self._formula(heads_TNH)
        scale = 4 * float(self.qkv_TO[:, num_turned * self.head_dim :].abs().max())
        return both(
            near(heads_TNH[:, :num_turned], expected_TNH, float(expected_TNH.abs().max())),
            near(out_TX, formula_TX, scale),
            near(fused_BX, formula_TX[decodes], scale),
        )

    def _turned(self) -> Tensor:
        """Normalized and rotated queries and keys, [T, N + K, H]."""
        num_turned = self.num_heads + self.sizes.num_kv_heads
        x_TNH = self.qkv_TO.double().unflatten(1, (-1, self.head_dim))[:, :num_turned]
        if self.layer.norm_NH is not None:
            x_TNH = _norm(x_TNH, self.layer.norm_NH)
        turns_TC = torch.view_as_complex(self.turns_PH.double().unflatten(1, (-1, 2)))[self.paged.positions_T]
        turned_TNC = torch.view_as_complex(x_TNH.unflatten(2, (-1, 2)).contiguous()) * turns_TC[:, None]
        return torch.view_as_real(turned_TNC).flatten(2)

    def _formula(self, heads_TNH: Tensor) -> Tensor:
        """Attention of rotated queries to what the cache holds."""
        sizes, outputs, row = self.sizes, [], 0
        cache = self.layer.blocks.to(sizes.dtype).view(-1, 2, sizes.num_kv_heads, BLOCK_SIZE, self.head_dim)
        for slot, (start, count) in enumerate(self.paged.each):
            end = start + count
            blocks = cache[self.paged.tables_SM[slot, : -(-end // BLOCK_SIZE)].long()].float()
            keys_LNH, values_LNH = (
                each.permute(0, 2, 1, 3).flatten(0, 1)[:end].repeat_interleave(sizes.group, 1)
                for each in blocks.unbind(1)
            )
            q_TNH = heads_TNH[row : row + count, : self.num_heads].float()
            positions = torch.arange(end, device=q_TNH.device)
            behind_TL = positions[start:, None] - positions
            is_seen_TL = (behind_TL >= 0) & (behind_TL < (self.window or end))
            scores_NTL = torch.einsum("tnh,lnh->ntl", q_TNH, keys_LNH) / self.head_dim**0.5
            weights_NTL = scores_NTL.masked_fill(~is_seen_TL, -math.inf).softmax(-1)
            outputs.append(torch.einsum("ntl,lnh->tnh", weights_NTL, values_LNH).flatten(1))
            row += count
        return torch.cat(outputs).double()
