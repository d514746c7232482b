"""The hidden states that a head reads, on their way through the stages whose layers get them.

Shape suffixes: T tokens of a step, D hidden size, X hidden states of several layers side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from raycore.decoder.network import Network, Taps
from raycore.parallel.links import Link
from raycore.parts.drafts.runner.stored_drafts import StoredDrafts
from raycore.runner.part import StepExtra
from raycore.runner.rows import StepRows
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors


class StageStates:
    """The hidden states that a head reads, of this worker's stage and of the stages before."""

    def __init__(
        self,
        target: Network,
        target_layers: Sequence[int],
        links: Sequence[Link],
        rows: StepRows,
        max_rows: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            target_layers: those whose inputs the head reads, ascending, as `Taps` number them.
            links: from the stage before, if there is one.
            rows: which rows of a step the layers of this worker get.
            max_rows: the largest number of rows of a step, padding included.
        """
        assert target.takes_taps, "a head reads the target's hidden states"
        stage = target.stage.layers
        end = stage.stop + 2 * target.stage.is_last  # the last norm's input and its result count as layers' inputs
        size, known = target.hidden_size, [layer for layer in target_layers if layer < end]
        self._links = links
        self._rows = rows
        self._num_before = size * sum(layer < stage.start for layer in target_layers)
        """Numbers of each token that the stage before sends."""
        self._states_TX = torch.zeros(max_rows, len(known) * size, dtype=target.dtype, device=device)
        self.taps: Taps = {
            layer: partial(self._keep, slice(index * size, (index + 1) * size))
            for index, layer in enumerate(known)
            if layer >= stage.start
        }

    def of_step(self, num_rows: int) -> Tensor:
        """Return the states of the step that has just been computed [num_rows, X], with those of stages before."""
        states_TX = self._states_TX[:num_rows]
        for link in self._links if self._num_before else ():
            before_TX = torch.empty(num_rows, self._num_before, dtype=states_TX.dtype, device=states_TX.device)
            states_TX[:, : self._num_before] = link.receive_into(before_TX)
        return states_TX

    def _keep(self, columns: slice, hidden_TD: Tensor) -> None:
        hidden_TD = self._rows.gather(hidden_TD)
        self._states_TX[: len(hidden_TD), columns].copy_(hidden_TD)


class ReadStage(StoredDrafts):
    """A stage before the one with the head: sends on what the head reads."""

    def __init__(self, states: StageStates, sink: Link, num_slots: int, max_tokens: int) -> None:
        """`sink`: to the next stage. The others are those of `StoredDrafts`."""
        super().__init__(num_slots, max_tokens)
        self._states = states
        self._sink = sink

    def taps(self, step: StepInputs) -> Taps:
        return self._states.taps

    def end_forward(self, step: StepInputs, tensors: StepTensors, extras: list[StepExtra]) -> None:
        states_TX = self._states.of_step(len(step.positions))
        if states_TX.numel():
            self._sink.send(states_TX.clone())
