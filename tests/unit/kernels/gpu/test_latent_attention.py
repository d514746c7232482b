"""Latent attention on GPUs: the kernels keep the contract of latent attention."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies
from interpreted_triton import DEVICE, DTYPES
from latent_contract import LatentBatch, LatentSizes, Outcome, latent_sizes, outcome_of, plain_torch

from raycore.attention.paged_latent import TritonLatentAttention
from raycore.kernels.gpu import latent_attention
from raycore.kernels.gpu.attention import TokenLocations
from raycore.kernels.gpu.latent_attention import LatentAttentionKernels, LatentLayer, unsupported_latents

WITHOUT_SHRINKING = [hypothesis.Phase.reuse, hypothesis.Phase.generate]
"""Making a failing example smaller takes minutes in Triton's interpreter."""


def triton(batch: LatentBatch, num_multiprocessors: int = 1, *, batch_invariant: bool = False) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_attention, "multiprocessors_of", lambda device: num_multiprocessors)
        return outcome_of(
            lambda spec, kv: TritonLatentAttention(spec, kv, max_rows=8, batch_invariant=batch_invariant), batch, DEVICE
        )


@hypothesis.settings(max_examples=12, phases=WITHOUT_SHRINKING)
@hypothesis.given(latent_sizes(DTYPES, longest=300, most_rows=20), strategies.sampled_from([1, 5]))
def test_latent_attention_equals_the_formula(sizes: LatentSizes, num_multiprocessors: int) -> None:
    batch = LatentBatch(sizes)
    batch.check(triton(batch, num_multiprocessors))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_bits_depend_on_no_other_token(dtype: torch.dtype) -> None:
    sizes = LatentSizes(dtype=dtype, num_heads=3, rank=24, rotated_dim=4, chunks=((70, 1), (40, 9)))
    batch = LatentBatch(sizes)
    outcome = triton(batch, batch_invariant=True)
    batch.check(outcome)
    alone = LatentBatch(LatentSizes(dtype=dtype, num_heads=3, rank=24, rotated_dim=4, chunks=((44, 1),)))
    alone.fused_TNW, alone.turns_PX = batch.fused_TNW[5][None], batch.turns_PX
    alone.rows_XW[alone.places(0, range(44))] = outcome.rows_XW[batch.places(1, range(44))]
    assert torch.equal(triton(alone, batch_invariant=True).out_TNR[0], outcome.out_TNR[5])


@pytest.mark.parametrize("num_multiprocessors", [1, 5])
def test_padding_rows_become_zeros_and_are_not_stored(num_multiprocessors: int) -> None:
    batch = LatentBatch(LatentSizes(rank=16, rotated_dim=4, chunks=((40, 1),)))
    sizes = batch.sizes
    kernels = LatentAttentionKernels(
        num_heads=sizes.num_heads,
        rank=sizes.rank,
        width=sizes.width,
        block_size=sizes.block_size,
        device=DEVICE,
        scale=sizes.scale,
        norm_eps=1e-6,
        dtype=sizes.dtype,
        max_rows=3,
        num_multiprocessors=num_multiprocessors,
    )
    layer = LatentLayer(batch.rows_XW.to(DEVICE), batch.turns_PX.to(DEVICE), batch.norm_R.to(DEVICE))
    slots_T, positions_T = torch.tensor([-1, 1, -1], dtype=torch.int32), torch.tensor([0, 40, 0])
    locations = TokenLocations(slots_T.to(DEVICE), positions_T.to(DEVICE), batch.tables_SM.to(DEVICE))
    fused_TX = batch.fused_TNW.flatten(1).repeat(3, 1).to(DEVICE)
    out_TX = torch.full((3, sizes.num_heads * sizes.rank), torch.nan, device=DEVICE)
    kernels.prepare(layer, fused_TX, locations)
    kernels.attend_tokens(layer, fused_TX, locations, out_TX)
    assert not out_TX[[0, 2]].any()
    batch.check(Outcome(out_TX[1].view(1, sizes.num_heads, -1).cpu(), layer.rows_XW.cpu()))


def test_plain_torch_gives_the_same_in_16_bits() -> None:
    batch = LatentBatch(LatentSizes(dtype=torch.float16, num_heads=20, chunks=((100, 1), (0, 33))))
    assert torch.allclose(triton(batch).out_TNR, plain_torch(batch).out_TNR, atol=4e-3)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((514, 64, torch.float32), "kv_lora_rank=514"),
        ((512, 130, torch.float32), "130 rotated"),
        ((512, 64, torch.float64), "float64"),
        ((512, 64, torch.bfloat16), None),
    ],
)
def test_sizes_that_the_kernels_lack_are_named(sizes: tuple[int, int, torch.dtype], expected: str | None) -> None:
    reason = unsupported_latents(*sizes)
    assert reason is None if expected is None else expected in (reason or "")
