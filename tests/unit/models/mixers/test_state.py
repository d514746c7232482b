"""Which part of a checkpoint's tensors each rank gets for layers that keep states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from configs import SPEC
from msgspec.structs import replace

from raycore.checkpoint.sharded_state import Division, Shard, ShardPaths
from raycore.decoder.delta_mixer import DeltaWeights
from raycore.models.mixers.delta import DeltaSpec
from raycore.models.mixers.kda import KdaSpec
from raycore.models.mixers.kinds import StateSpec
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.models.mixers.short_conv import ShortConvSpec
from raycore.weights.loader import RankLayout, has_no_tensor, random_decoder_weights
from raycore.weights.named import named_weights
from raycore.weights.sharded_state import load_saved_weights, save_decoder_weights
from raycore.weights.share import WeightShare

HIDDEN = SPEC.hidden_size
STATE = DeltaSpec([True, False], 8, k_dim=6, v_dim=10, conv_size=3, num_k_heads=4, is_interleaved=True)
KEYS, VALUES = 24, 80


def tensors(state: DeltaSpec) -> dict[str, torch.Tensor]:
    """A layer's tensors. Each number says which row it is of."""

    def rows(num: int, *row: int) -> torch.Tensor:
        return torch.arange(num).float().view(-1, *[1] * len(row)).expand(num, *row)

    if state.is_interleaved:
        inputs = {"in_proj_qkvz": rows(2 * KEYS + 2 * VALUES, HIDDEN), "in_proj_ba": rows(16, HIDDEN)}
    else:
        inputs = {"in_proj_qkv": rows(2 * KEYS + VALUES, HIDDEN), "in_proj_z": rows(VALUES, HIDDEN) + 1000}
        inputs |= {"in_proj_b": rows(8, HIDDEN), "in_proj_a": rows(8, HIDDEN) + 1000}
    others = {"conv1d": rows(2 * KEYS + VALUES, 1, 3), "norm": rows(10), "out_proj": rows(VALUES, HIDDEN).t()}
    weights = {f"{name}.weight": tensor for name, tensor in (inputs | others).items()}
    return weights | {"A_log": rows(8), "dt_bias": rows(8) + 100}


def load(state: DeltaSpec, tp_size: int) -> Iterator[DeltaWeights]:
    stored = tensors(state)
    for tp_rank in range(tp_size):

        def fill(out: torch.Tensor, name: str, expected_shape: tuple[int, ...], part: object) -> None:
            tensor = stored[name.removeprefix("linear_attn.")]
            assert tensor.shape == expected_shape
            out.copy_(tensor[part])  # pyright: ignore

        share = WeightShare(replace(SPEC, state=state), torch.float32, tp_rank, tp_size)
        yield RankLayout(share, has_no_tensor, fill).part(state, "")  # pyright: ignore


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_rank_has_the_rows_of_its_key_heads_and_their_value_heads(tp_size: int) -> None:
    whole = next(load(STATE, 1))
    ranks = list(load(STATE, tp_size))
    # all rows of a key head are adjacent
    assert torch.equal(torch.cat([each.qkvz_ID for each in ranks]), whole.qkvz_ID)
    assert torch.equal(torch.cat([each.ba_ID for each in ranks]), whole.ba_ID)
    assert torch.equal(torch.cat([each.decay_N for each in ranks]), torch.arange(8.0))
    assert torch.equal(torch.cat([each.bias_N for each in ranks]), torch.arange(8.0) + 100)
    assert torch.equal(torch.cat([each.o_DO for each in ranks], 1), whole.o_DO)
    assert {each.decay_N.dtype for each in ranks} == {torch.float32}
    keys, values = KEYS // tp_size, VALUES // tp_size
    for rank, each in enumerate(ranks):
        channels = each.conv_CW[:, 0].int().tolist()
        assert channels[:keys] == list(range(rank * keys, (rank + 1) * keys))
        assert channels[keys : 2 * keys] == list(range(KEYS + rank * keys, KEYS + (rank + 1) * keys))
        assert channels[2 * keys :] == list(range(2 * KEYS + rank * values, 2 * KEYS + (rank + 1) * values))


def test_projections_with_tensors_of_their_own_are_fused() -> None:
    _, second = load(replace(STATE, is_interleaved=False), 2)
    first_of_each = second.qkvz_ID[[0, 12, 24, 64], 0]
    assert first_of_each.tolist() == [12, KEYS + 12, 2 * KEYS + 40, 1040]
    assert second.ba_ID[:, 0].tolist() == [4, 5, 6, 7, 1004, 1005, 1006, 1007]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_ranks_share_the_only_group_of_mamba2_and_divide_several(num_groups: int, tp_size: int) -> None:
    state = Mamba2Spec([True, False], 8, k_dim=6, v_dim=10, conv_size=3, num_groups=num_groups, has_conv_bias=True)
    values, states = state.num_values, num_groups * 6
    num_in = values + state.num_channels + 8
    stored = {
        "mamba.in_proj.weight": torch.arange(num_in).float()[:, None].expand(num_in, HIDDEN),
        "mamba.conv1d.weight": torch.arange(state.num_channels).float()[:, None, None].expand(-1, 1, 3),
        "mamba.conv1d.bias": torch.arange(state.num_channels).float(),
        "mamba.norm.weight": torch.arange(values).float(),
        "mamba.out_proj.weight": torch.arange(values).float().expand(HIDDEN, values),
        **{f"mamba.{name}": torch.arange(8).float() + at for at, name in enumerate(["A_log", "dt_bias", "D"])},
    }
    for tp_rank in range(tp_size):

        def fill(out: torch.Tensor, name: str, expected_shape: tuple[int, ...], part: object) -> None:
            assert stored[name].shape == expected_shape
            out.copy_(stored[name][part])  # pyright: ignore

        share = WeightShare(replace(SPEC, state=state), torch.float32, tp_rank, tp_size)
        own = RankLayout(share, has_no_tensor, fill).part(state, "")  # pyright: ignore

        def part_of(first: int, size: int, *, is_whole: bool = False, tp_rank: int = tp_rank) -> list[int]:
            num = size if is_whole else size // tp_size
            start = first if is_whole else first + tp_rank * num
            return list(range(start, start + num))

        is_whole = num_groups == 1
        channels = part_of(0, values) + part_of(values, states, is_whole=is_whole)
        channels += part_of(values + states, states, is_whole=is_whole)
        assert own.conv_CW[:, 0].tolist() == channels
        assert own.conv_bias_C is not None
        assert own.conv_bias_C.tolist() == channels
        assert own.z_OD[:, 0].tolist() == own.norm_O.tolist() == own.o_DO[0].tolist() == part_of(0, values)
        assert own.in_ID[:, 0].tolist() == [values + each for each in channels] + part_of(num_in - 8, 8)
        assert (own.bias_N - own.decay_N).tolist() == (own.skip_N - own.bias_N).tolist() == [1.0] * (8 // tp_size)
        assert own.decay_N.tolist() == part_of(0, 8)


@pytest.mark.parametrize(
    "state",
    [
        STATE,
        Mamba2Spec([True, False], 8, k_dim=6, v_dim=10, conv_size=3, num_groups=1, has_conv_bias=True),
        KdaSpec([True, False], 4, k_dim=6, v_dim=6, conv_size=3),
        ShortConvSpec([True, False], HIDDEN, conv_size=3, has_bias=True),
    ],
    ids=["gated delta rule", "Mamba-2", "Kimi's delta attention", "short convolution"],
)
def test_a_ranks_share_is_read_again_as_it_was_written(tmp_path: Path, state: StateSpec) -> None:
    spec = replace(SPEC, state=state)
    share, files = WeightShare(spec, torch.float32, 1, 2), ShardPaths(tmp_path, Division(2).pattern, Shard(1))
    weights = random_decoder_weights(share, seed=3)
    save_decoder_weights(weights, spec, Division(2), files, None)
    found = dict(named_weights(load_saved_weights(share, files)))
    expected = dict(named_weights(weights))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert isinstance(tensor, torch.Tensor)
        assert torch.equal(tensor, expected[name]), name  # pyright: ignore
        assert tensor.dtype == expected[name].dtype
