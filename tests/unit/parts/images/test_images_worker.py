"""A step of an engine that only encodes gives each request that is done a token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raycore.parts.images.worker import NoTexts


@pytest.mark.parametrize("num_done", [0, 2])
def test_only_requests_whose_prompts_are_done_get_a_token(num_done: int) -> None:
    launched: Any = SimpleNamespace(token_ids=None)
    step: Any = SimpleNamespace(sampled=np.arange(num_done))
    NoTexts().take(step, SimpleNamespace(), torch.zeros(3, 8), launched, has_all=False)  # pyright: ignore
    if num_done:
        assert launched.token_ids.arrays()[0].tolist() == [0] * num_done
    else:
        assert launched.token_ids is None
