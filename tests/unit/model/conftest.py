"""Everything here is far too small for more than one thread to help."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
