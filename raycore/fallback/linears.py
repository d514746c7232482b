"""The linear layers of a network that transformers computes."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from raycore.fallback.library import library
from raycore.fallback.plan import COLUMNS, GATHERED, ROWS, SPLIT_ROWS, plan_of
from raycore.fallback.trace import Trace
from raycore.models.spec import LinearShape


def as_linear(module: nn.Module) -> nn.Linear | None:
    """Return a linear layer that computes what `module` does. None: it isn't one."""
    conv1d = library("pytorch_utils").Conv1D
    if type(module) is nn.Linear:
        return module
    if type(module) is not conv1d:
        return None
    # GPT-2's: a linear layer whose weight has a row for each input
    weight_IO = cast(nn.Parameter, module.weight)
    made = nn.Linear(weight_IO.shape[0], weight_IO.shape[1], device="meta")
    made.weight = nn.Parameter(weight_IO.t(), requires_grad=False)
    made.bias = cast(nn.Parameter, module.bias)
    return made


def adaptable(network: Any, done: Trace) -> dict[str, LinearShape]:
    """Return the linear layers that adapters may change, by name.

    They get one row for each token of a step, because adapters find the rows of their requests by these. So the head
    isn't among them, nor what is after the layers, nor experts, which get some tokens' rows.
    """
    attending = {call.module for call in done.calls}
    bodies = [module for module in done.outer if attending <= set(module.modules())]
    inside = {each for body in bodies for each in body.modules()}
    plan = plan_of(network) or {}
    found: dict[str, LinearShape] = {}
    for name, module in network.named_modules():
        linear = as_linear(module) if module in inside and module in done.of_tokens else None
        if linear is not None:
            found[name] = _shape(linear, plan.get(name))
    return found


def _shape(linear: nn.Linear, style: str | None) -> LinearShape:
    divided = "outputs" if style in (COLUMNS, GATHERED) else "inputs" if style in (ROWS, SPLIT_ROWS) else None
    return LinearShape(linear.out_features, linear.in_features, divided)
