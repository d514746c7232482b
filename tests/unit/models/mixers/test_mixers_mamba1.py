"""What ranks hold of Mamba-1, and what it keeps."""

from __future__ import annotations

from configs import SPEC
from msgspec.structs import replace

from raycore.models.mixers.mamba1 import Mamba1Spec
from raycore.models.mixers.spec import StateTensor

MAMBA = Mamba1Spec([True, False], 12, state_size=5, time_size=3, conv_size=4, has_bias=True, has_conv_bias=True)
MODEL = replace(SPEC, state=MAMBA)


def test_a_rank_keeps_the_states_of_its_channels() -> None:
    assert MAMBA.split_sizes == {"mamba_expand times hidden_size": 12}
    assert MAMBA.state(3) == (
        StateTensor("conv_states_RCW", (4, 3)),
        StateTensor("states_RNKH", (1, 5, 4), is_float32=True),
    )


def test_every_rank_has_all_that_times_and_b_and_c_are_made_of() -> None:
    inputs, selected, times, output = MAMBA.linears(MODEL, 1, 3)
    own = slice(4, 8)
    assert [part.stored_part for part in inputs.outputs] == [own, slice(16, 20)]
    assert (selected.outputs[0].total, selected.outputs[0].num) == (13, 13)
    assert (selected.inputs.part, selected.reads_divided) == (own, True)
    assert (times.outputs[0].part, times.inputs.num, times.reads_divided) == (own, 3, False)
    assert (output.inputs.part, output.reads_divided) == (own, True)
    assert inputs.biased == output.biased == {"mamba.in_proj", "mamba.out_proj"}


def test_norms_that_have_weights_are_on_every_rank() -> None:
    names = [vector.field for vector in MAMBA.vectors(MODEL)]
    assert replace(MAMBA, norms="bare").vectors(MODEL) == MAMBA.vectors(MODEL)
    *others, dt, b, c = replace(MAMBA, norms="weighted").vectors(MODEL, 2, 3)
    assert [vector.field for vector in others] == names
    assert [vector.parts[0].num for vector in (dt, b, c)] == [3, 5, 5]


def test_biases_of_projections_and_of_the_convolution_are_optional() -> None:
    bare = replace(MAMBA, has_bias=False, has_conv_bias=False)
    biases = {"mamba.in_proj.bias", "mamba.out_proj.bias", "mamba.conv1d.bias"}
    # that of times is no option
    assert MAMBA.tensors(MODEL).keys() - bare.tensors(MODEL).keys() == biases
