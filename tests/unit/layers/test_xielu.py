"""xIELU, compared with transformers' activation."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2CLS

from raycore.layers.xielu import Xielu


@pytest.mark.parametrize("constants", [None, (0.5, -1e-6), (0.25, -0.5)])
def test_xielu_equals_the_activation_of_transformers(constants: tuple[float, float] | None) -> None:
    beta, eps = constants or (0.5, -1e-6)
    theirs = ACT2CLS["xielu"](alpha_p_init=0.9, alpha_n_init=1.1, beta=beta, eps=eps, dtype=torch.float32)
    alphas = torch.cat([theirs.alpha_p, theirs.alpha_n]).detach()
    ours = Xielu(alphas, None if constants is None else torch.tensor(constants))
    x = torch.cat([torch.linspace(-8, 8, 161), torch.tensor([-1e-3, -1e-7, 0.0, 1e-7])]).reshape(5, -1)
    torch.testing.assert_close(ours(x), theirs(x).detach())
    short = ours(x.bfloat16())
    assert short.dtype == torch.bfloat16
    torch.testing.assert_close(short, ours(x.bfloat16().float()).bfloat16())
