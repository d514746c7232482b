"""Checks of `benchmarks/gpu.py`: Triton's kernels of latent attention against the formula, with sizes of real models.

Shape suffixes: T tokens, B decodes, N query heads, W elements of a query or of a key, R those of a latent, L keys, C
pairs of rotated elements, X numbers of a token.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.checks import Checks
from gpu.kernels import BLOCK_SIZE, EPS, PagedSequences, Sizes, both, near, randn
from raycore.kernels.gpu.latent_attention import LatentAttentionKernels, LatentLayer


@dataclass(frozen=True)
class LatentSizes:
    """Sizes that several models have: those of DeepSeek-V2 and V3 and GLM-4.7-Flash."""

    num_heads: tuple[int, ...] = (16, 20, 128)
    rank: int = 512
    rotated_dim: int = 64


def check_latents(checks: Checks, sizes: Sizes | None = None, latents: LatentSizes | None = None) -> None:
    """Compare decodes, chunks and what is stored with the formula."""
    sizes, latents = sizes or Sizes(), latents or LatentSizes()
    device = torch.device(checks.device)
    for num_heads in latents.num_heads:
        for batch_invariant in (False, True):
            case = functools.partial(LatentCase, sizes, latents, device, num_heads, batch_invariant=batch_invariant)
            name = f"{num_heads} heads{', batch-invariant' if batch_invariant else ''}"
            checks.run(f"kernels: latent attention, {name}", lambda case=case: case().check())


class LatentCase:
    """Decodes and chunks of prompts of one layer."""

    def __init__(
        self, sizes: Sizes, latents: LatentSizes, device: torch.device, num_heads: int, *, batch_invariant: bool
    ) -> None:
        self.num_heads, self.rank = num_heads, latents.rank
        self.width = latents.rank + latents.rotated_dim
        self.paged = PagedSequences(sizes, device)
        self.scale = 1 / math.sqrt(self.width)
        num_tokens = len(self.paged.slots_T)
        self.fused_TX = randn(0, device, sizes.dtype, num_tokens, (num_heads + 1) * self.width)
        self.layer = LatentLayer(
            randn(1, device, sizes.dtype, self.paged.num_blocks * BLOCK_SIZE, self.width),
            self.paged.turns(2, latents.rotated_dim),
            randn(3, device, sizes.dtype, latents.rank),
        )
        self.kernels = LatentAttentionKernels(
            num_heads=num_heads,
            rank=latents.rank,
            width=self.width,
            block_size=BLOCK_SIZE,
            device=device,
            scale=self.scale,
            norm_eps=EPS,
            dtype=sizes.dtype,
            max_rows=self.paged.num_decodes,
            batch_invariant=batch_invariant,
        )

    def check(self) -> tuple[bool, str]:
        """Compare what is prepared, and attention, with the formula."""
        paged = self.paged
        expected_TNW = self._prepared()
        out_TX = torch.full((len(self.fused_TX), self.num_heads * self.rank), math.nan).to(self.fused_TX)
        self.kernels.prepare(self.layer, self.fused_TX, paged.locations)
        decodes = slice(paged.num_decodes)
        locations = paged.locations.part(0, paged.num_decodes)
        self.kernels.attend_tokens(self.layer, self.fused_TX[decodes], locations, out_TX[decodes])
        tiles_I4 = paged.tiles(self.kernels.tile_tokens)
        self.kernels.attend_chunks(self.layer, self.fused_TX, tiles_I4, paged.tables_SM, out_TX)
        q_TNW = self.fused_TX.unflatten(1, (-1, self.width))[:, :-1]
        blocks_T = paged.tables_SM[paged.slots_T.long(), paged.positions_T // BLOCK_SIZE].long()
        stored_TW = self.layer.rows_XW[blocks_T * BLOCK_SIZE + paged.positions_T % BLOCK_SIZE]
        largest = float(expected_TNW.abs().max())
        return both(
            near(q_TNW, expected_TNW[:, :-1], largest),
            near(stored_TW, expected_TNW[:, -1], largest),
            near(out_TX, self._formula(q_TNW), 4 * float(self.layer.rows_XW.abs().max())),
        )

    def _prepared(self) -> Tensor:
        """Rotated queries, and the keys that are stored, [T, N + 1, W]."""
        x_TNW = self.fused_TX.double().unflatten(1, (-1, self.width))
        latents_TR = x_TNW[:, -1, : self.rank]
        norms_T1 = (latents_TR.square().mean(-1, keepdim=True) + EPS).sqrt()
        x_TNW[:, -1, : self.rank] = latents_TR / norms_T1 * self.layer.norm_R.double()
        turns_PC = torch.view_as_complex(self.layer.turns_PX.double().unflatten(1, (-1, 2)))
        pairs_TNC = torch.view_as_complex(x_TNW[..., self.rank :].unflatten(2, (-1, 2)).contiguous())
        rotated_TNC = pairs_TNC * turns_PC[self.paged.positions_T][:, None]
        x_TNW[..., self.rank :] = torch.view_as_real(rotated_TNC).flatten(2)
        return x_TNW

    def _formula(self, q_TNW: Tensor) -> Tensor:
        """Attention of rotated queries to what the cache holds, [T, N · R]."""
        rows = self.layer.rows_XW.view(-1, BLOCK_SIZE, self.width)
        outputs: list[Tensor] = []
        row = 0
        for slot, (start, count) in enumerate(self.paged.each):
            end = start + count
            blocks_M = self.paged.tables_SM[slot, : -(-end // BLOCK_SIZE)].long()
            keys_LW = rows[blocks_M].flatten(0, 1)[:end].float()
            scores_NTL = torch.einsum("tnw,lw->ntl", q_TNW[row : row + count].float(), keys_LW) * self.scale
            positions_L = torch.arange(end, device=keys_LW.device)
            is_hidden_TL = positions_L > positions_L[start:, None]
            weights_NTL = scores_NTL.masked_fill_(is_hidden_TL, -math.inf).softmax(-1)
            outputs.append((weights_NTL @ keys_LW[:, : self.rank]).transpose(0, 1).flatten(1))
            row += count
        return torch.cat(outputs).double()
