"""The experts of tokens in responses, as vLLM's server gives them."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray


def experts_field(experts: NDArray[np.generic] | None) -> dict[str, Any]:
    """Return the field of a choice that has ended: a file of `numpy.save`, in base64. None: the engine returns none."""
    if experts is None:
        return {}
    file = io.BytesIO()
    np.save(file, experts)
    return {"routed_experts": base64.b64encode(file.getvalue()).decode()}
