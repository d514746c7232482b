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
        sequences = np.stack([step.slots, step.first_rows, step.counts, step.starts], axis=1)
        self._sequences = torch.as_tensor(sequences.astype(np.int32))
        self._tables = tensors.block_tables_SM
