"""The values in a feature's data, as a tensor."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raycore.messages import FeatureData


def values_of(data: FeatureData) -> Tensor:
    """Return the values of `data`, in its shape and type, on the CPU."""
    is_bfloat16 = data.dtype == "bfloat16"
    values = torch.as_tensor(np.array(np.frombuffer(data.data, np.int16 if is_bfloat16 else data.dtype)))
    values = values.view(torch.bfloat16) if is_bfloat16 else values
    return values.view(data.shape)
