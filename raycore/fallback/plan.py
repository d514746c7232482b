"""How tensor-parallel ranks divide a network, by the plan that transformers has for it.

A plan has styles by the names of modules and parameters, with `*` for numbers of layers. Columns are those of the
product, so the rows of a weight, which has a row for each output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from raycore.parallel.tensor_parallel import TensorParallel

COLUMNS, GATHERED, ROWS, SPLIT_ROWS = "colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"
PACKED_COLUMNS = "packed_colwise"
"""Two weights, one below the other, each divided by columns."""
EXPERTS = "moe_tp_experts"
"""A module whose parameters have a weight for each expert. The ranks' results are summed."""
_OF_LINEAR = (COLUMNS, GATHERED, ROWS, SPLIT_ROWS)
_OF_EXPERTS = (COLUMNS, PACKED_COLUMNS, ROWS)
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Styles of modules that each rank computes whole."""


def plan_of(network: Any) -> Mapping[str, str] | None:
    """Return the styles of the modules and parameters that ranks divide, by name. None: they can't divide it."""
    plan: Mapping[str, str] = network._tp_plan or {}
    found: dict[str, str] = {}
    for name, module in network.named_modules():
        style = _style(plan, name)
        if style is None or style in _WHOLE or isinstance(module, nn.Embedding):
            continue  # an embedding's rows are divided whatever the plan says
        if style == EXPERTS:
            found |= {name: style} | _styles_of_experts(plan, name, module)
        elif style in _OF_LINEAR and type(module) is nn.Linear:
            found[name] = style
        else:
            return None
    parameters = {name: _style(plan, name) for name, _ in network.named_parameters()}
    if any(style not in (None, *_WHOLE) and name not in found for name, style in parameters.items()):
        return None
    return found if divided_sizes(network, found) else None


def divided_sizes(network: Any, plan: Mapping[str, str] | None) -> list[int]:
    """Return the sizes that ranks divide. Empty: they can't divide the network."""
    head = network.get_output_embeddings()
    modules, parameters = dict(network.named_modules()), dict(network.named_parameters())
    sizes: list[int] = []
    for name, style in (plan or {}).items():
        if name in parameters:
            dim, number = _divided(style)
            sizes.append(parameters[name].shape[dim] // number)
        elif style != EXPERTS and modules[name] is not head:
            sizes.append(modules[name].out_features if style in (COLUMNS, GATHERED) else modules[name].in_features)
    return sizes


def expert_part(weights_EXX: Tensor, style: str, ranks: TensorParallel) -> Tensor:
    """Return a rank's part of a parameter that has a weight for each expert."""
    dim, number = _divided(style)
    parts = [part.chunk(ranks.size, dim)[ranks.rank] for part in weights_EXX.chunk(number, dim)]
    return torch.cat(parts, dim)


def _divided(style: str) -> tuple[int, int]:
    """Return the dimension that is divided, and how many weights share it."""
    return (-1, 1) if style == ROWS else (-2, 2 if style == PACKED_COLUMNS else 1)


def _styles_of_experts(plan: Mapping[str, str], name: str, module: nn.Module) -> dict[str, str]:
    styles = {f"{name}.{each}": _style(plan, f"{name}.{each}") for each, _ in module.named_parameters()}
    return {each: style for each, style in styles.items() if style in _OF_EXPERTS}


def _style(plan: Mapping[str, str], name: str) -> str | None:
    return plan.get(re.sub(r"\d+", "*", name))
