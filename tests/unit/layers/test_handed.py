"""What layers hand to later ones within a step."""

import torch

from raycore.layers.handed import Handed


def test_a_layer_gets_its_own_input_for_the_rows_that_it_ends_with() -> None:
    handed, inputs_TLP = Handed(), torch.arange(24.0).view(3, 2, 4)
    handed.begin(inputs_TLP)
    torch.testing.assert_close(handed.inputs(1), inputs_TLP[:, 1])
    handed.keep_rows(torch.tensor([2]))
    torch.testing.assert_close(handed.inputs(1), inputs_TLP[2:, 1])
    handed.begin(inputs_TLP)
    assert len(handed.inputs(0)) == 3


def test_keys_and_values_are_those_of_the_step() -> None:
    handed = Handed()
    for value in (1.0, 2.0):
        handed.keep(4, torch.full((2, 3), value))
        torch.testing.assert_close(handed.kept(4), torch.full((2, 3), value))
