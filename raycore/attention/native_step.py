"""What native kernels of attention are told of a step."""

from __future__ import annotations

import numpy as np
import torch

from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Those that the kernels compute in."""


class NativeStep:
    """The sequences of a step, and their blocks."""

    def __init__(self) -> None:
        self._tables = self._sequences = torch.empty(0)

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        sequences = np.empty((len(step.slots), 4), np.int32)
        for column, numbers in enumerate((step.slots, step.first_rows, step.counts, step.starts)):
            sequences[:, column] = numbers
        self._sequences = torch.as_tensor(sequences)
        self._tables = tensors.block_tables_SM
