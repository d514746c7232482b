"""What a head reads of layers in several stages comes to the last one, in the order of the layers."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raycore.checkpoint.stages import Stage
from raycore.parts.drafts.runner.stage_states import ReadStage, StageStates
from raycore.runner.rows import ALL_ROWS

SIZE, MAX_ROWS = 3, 5
CPU = torch.device("cpu")


class Pipe:
    """Both ends of a link."""

    def __init__(self) -> None:
        self.sent: deque[torch.Tensor] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self.sent.append(tensor)

    def receive_into(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self.sent.popleft())


@pytest.mark.parametrize("read", [[0, 3, 5], [1, 2], [4, 5], [0], [0, 1, 2, 3, 4, 5], [6], [7], [1, 6], [6, 7]])
def test_states_of_all_stages_are_side_by_side(read: list[int]) -> None:
    """6 stands for the last norm's input, and 7 for the final hidden states."""
    pipes: list[Any] = [Pipe(), Pipe()]
    stages = [Stage(range(2), is_last=False), Stage(range(2, 4), is_last=False), Stage(range(4, 6))]
    states: list[StageStates] = []
    for number, stage in enumerate(stages):
        target: Any = SimpleNamespace(takes_taps=True, hidden_size=SIZE, dtype=torch.float32, stage=stage)
        states.append(StageStates(target, read, pipes[number - 1 : number] if number else [], ALL_ROWS, MAX_ROWS, CPU))
    parts = [ReadStage(each, pipe, 4, 2) for each, pipe in zip(states, pipes, strict=False)]
    for num_rows in (4, 1):
        inputs = {layer: torch.randn(num_rows, SIZE) for layer in range(8)}
        step: Any = SimpleNamespace(positions=np.zeros(num_rows))
        for part, stage in zip([*parts, states[-1]], stages, strict=True):
            taps = part.taps(step) if isinstance(part, ReadStage) else part.taps
            layers = range(stage.layers.start, stage.layers.stop + 2 * stage.is_last)
            assert taps.keys() == set(read) & set(layers)
            for layer, tap in taps.items():
                tap(inputs[layer])
            if isinstance(part, ReadStage):
                part.end_forward(step, step, [])
        assert torch.equal(states[-1].of_step(num_rows), torch.cat([inputs[layer] for layer in read], dim=1))
        assert not any(pipe.sent for pipe in pipes), "everything that is sent is taken"
