"""Puts raycore's layers in the place of a network's own: linear layers, RMS norms, gated networks, the embedding.

A norm or a gated network is only replaced if raycore's gives the same for random rows. Letters of shapes: T tokens, D
hidden size, I inputs, O outputs, F intermediate size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from raycore.decoder.decoder import embed
from raycore.fallback.linears import as_linear
from raycore.fallback.plan import COLUMNS, EXPERTS, GATHERED, ROWS, SPLIT_ROWS, expert_part
from raycore.layers.gate import gate_and_mul
from raycore.layers.linear import Linear
from raycore.layers.operations import GatedLinear, Norm, Operations
from raycore.models.spec import Gate
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.adapters.layers import Adapters

_GATES: tuple[Gate, ...] = ("silu", "gelu_tanh", "gelu", "relu2")
_NUM_ROWS = 3
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest difference of results, as a fraction of the largest result."""


class LinearModule(nn.Module):
    """raycore's linear layer, as a module of transformers."""

    def __init__(self, linear: Linear, weight_OI: Tensor, part: slice | None = None) -> None:
        """
        Args:
            weight_OI: what `linear` was made of.
            part: the columns of the input that it reads. None: all.
        """
        super().__init__()
        self._linear, self._num_outputs, self._part = linear, len(weight_OI), part
        self.weight = torch.empty_like(weight_OI, device="meta")
        """Has only a shape and a data type, which some code asks for."""

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., O] for [..., I]."""
        if self._part is not None:
            x = x[..., self._part]
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self._num_outputs)


class GatheredModule(nn.Module):
    """A linear layer whose outputs are divided over ranks, and gathered."""

    def __init__(self, linear: Linear, num_outputs: int, ranks: TensorParallel) -> None:
        super().__init__()
        self._linear, self._num_outputs, self._ranks = linear, num_outputs, ranks

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., O] for [..., I]. Outputs behind the layer's own are padding, and left out."""
        out_TO = self._ranks.all_gather_columns(self._linear(x.reshape(-1, x.shape[-1])))
        return out_TO[:, : self._num_outputs].view(*x.shape[:-1], self._num_outputs)


class ReducedModule(nn.Module):
    """A module of which each rank has a part. The ranks' results are summed."""

    def __init__(self, module: nn.Module, ranks: TensorParallel) -> None:
        super().__init__()
        self._module, self._ranks = module, ranks

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        """Return the sum."""
        return self._ranks.all_reduce_(self._module(*arguments, **named).contiguous())


class NormModule(nn.Module):
    """raycore's RMS norm."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self._norm = norm

    @property
    def weight(self) -> Tensor:
        return self._norm.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm over the last dimension."""
        return self._norm(x.reshape(-1, x.shape[-1])).view(x.shape)


class GatedModule(nn.Module):
    """raycore's gated network."""

    def __init__(self, gate_up: GatedLinear, down: Linear) -> None:
        super().__init__()
        self._gate_up, self._down = gate_up, down

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., D] for [..., D]."""
        return self._down(self._gate_up(x.reshape(-1, x.shape[-1]))).view(x.shape)


class EmbeddingModule(nn.Module):
    """An embedding whose rows are divided over ranks."""

    def __init__(self, weight_VD: Tensor, vocab_start: int, ranks: TensorParallel) -> None:
        super().__init__()
        self.weight, self._vocab_start, self._ranks = weight_VD, vocab_start, ranks

    def forward(self, token_ids_1T: Tensor) -> Tensor:
        """Return [1, T, D]."""
        return embed(self.weight, self._vocab_start, token_ids_1T[0], self._ranks)[None]


class Replacements:
    """Replaces modules of a network, and frees what they held."""

    def __init__(
        self,
        network: Any,
        called: Container[nn.Module],
        operations: Operations,
        ranks: TensorParallel,
        plan: Mapping[str, str],
        adapters: Adapters | None = None,
        adaptable: Container[str] = (),
    ) -> None:
        """
        Args:
            called: the modules whose `forward` a pass calls. Others stay: something else reads their weights.
            plan: the styles of the modules that ranks divide.
            adapters: change linear layers. None: there are none.
            adaptable: the names of those that they may change.
        """
        self._network = network
        self._called = called
        self._operations = operations
        self._ranks = ranks
        self._plan = plan
        self._adapters = adapters
        self._adaptable = adaptable if adapters is not None else ()
        self._head = network.get_output_embeddings()
        self._embedding = network.get_input_embeddings()
        self.num_replaced = Counter[str]()
        """By kind of module."""
        self.num_weights = 0
        """Number of multiplications for one token in the linear layers that were replaced."""

    def replace(self) -> None:
        """Replace all that can be replaced, on the device of the operations."""
        is_tied = self._head is not None and self._head.weight is self._embedding.weight
        for name, module in list(self._network.named_modules()):
            if module not in self._called or module in (self._head, self._embedding):
                continue
            made = self._gated(name, module) or self._norm(module)
            if made is not None:
                self._set(name, made)
                _free(module)
        for name, module in list(self._network.named_modules()):
            linear = None if module is self._head or module not in self._called else as_linear(module)
            if linear is not None:
                self._set(name, self._linear(name, linear))
                _free(module)
        for name in [name for name, style in self._plan.items() if style == EXPERTS]:
            self._divide_experts(name)
        self._replace_vocabulary(is_tied)
        self._network.to(self._operations.device)

    def _set(self, name: str, module: nn.Module) -> None:
        self.num_replaced[type(module).__name__] += 1
        parent, _, attribute = name.rpartition(".")
        setattr(self._network.get_submodule(parent), attribute, module.eval())

    def _set_wherever(self, module: nn.Module, made: nn.Module) -> None:
        for name, each in list(self._network.named_modules(remove_duplicate=False)):
            if each is module:
                self._set(name, made)

    # ---- linear layers

    def _linear(self, name: str, module: nn.Linear) -> nn.Module:
        style = self._plan.get(name)
        weight_OI, bias_O = self._share(module, style)
        self.num_weights += weight_OI.numel()
        ranks = self._ranks if style in (ROWS, SPLIT_ROWS) else None
        linear = self._operations.linear(weight_OI, bias_O, ranks)
        if self._adapters is not None and name in self._adaptable:
            linear = self._adapters.around(linear, name, ranks)
        if style == GATHERED:
            return GatheredModule(linear, module.out_features, self._ranks)
        return LinearModule(linear, weight_OI, self._part(module.in_features) if style == SPLIT_ROWS else None)

    def _share(self, module: nn.Linear, style: str | None) -> tuple[Tensor, Tensor | None]:
        """Return this rank's part of a layer's weight and bias."""
        weight_OI, bias_O = module.weight.detach(), _bias(module)
        if style in (COLUMNS, GATHERED):
            rows = self._part(module.out_features)
            weight_OI, bias_O = weight_OI[rows].clone(), None if bias_O is None else bias_O[rows].clone()
        elif style in (ROWS, SPLIT_ROWS):
            weight_OI = weight_OI[:, self._part(module.in_features)].contiguous()
            # the sum over ranks must include the bias only once
            bias_O = bias_O if self._ranks.rank == 0 else None
        return weight_OI, bias_O

    def _part(self, size: int) -> slice:
        own = size // self._ranks.size
        return slice(self._ranks.rank * own, (self._ranks.rank + 1) * own)

    def _divide_experts(self, name: str) -> None:
        module = self._network.get_submodule(name)
        for each, parameter in list(module.named_parameters(recurse=False)):
            style = self._plan.get(f"{name}.{each}")
            if style is not None:
                own = expert_part(parameter.detach(), style, self._ranks)
                setattr(module, each, nn.Parameter(own, requires_grad=False))
        self._set(name, ReducedModule(module, self._ranks))

    # ---- norms

    def _norm(self, module: nn.Module) -> nn.Module | None:
        """Return raycore's norm, if it computes what `module` does."""
        weights = dict(module.named_parameters())
        eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
        if not type(module).__name__.endswith("RMSNorm") or list(weights) != ["weight"] or not isinstance(eps, float):
            return None
        weight_D = weights["weight"].detach()
        if weight_D.ndim != 1:
            return None
        for offset in (0.0, 1.0):
            norm = self._operations.rms_norm(weight_D, eps, offset)
            if self._same(module, NormModule(norm), len(weight_D), weight_D.dtype):
                return NormModule(norm)
        return None

    # ---- gated networks

    def _gated(self, name: str, module: nn.Module) -> nn.Module | None:
        """Return raycore's gated network, if `module` is one."""
        if any(f"{name}.{each}_proj" in self._adaptable for each in ("gate", "up", "down")):
            return None  # adapters change each of them
        gate, up, down = (getattr(module, f"{each}_proj", None) for each in ("gate", "up", "down"))
        if type(gate) is not nn.Linear or type(up) is not nn.Linear or type(down) is not nn.Linear:
            return None
        if set(module.parameters()) != {each for layer in (gate, up, down) for each in layer.parameters()}:
            return None
        styles = [self._plan.get(f"{name}.{each}_proj") for each in ("gate", "up", "down")]
        if styles not in ([None] * 3, [COLUMNS, COLUMNS, ROWS]) or (_bias(gate) is None) != (_bias(up) is None):
            return None
        activation = self._activation(module, gate, up, down)
        return None if activation is None else self._make_gated(gate, up, down, styles, activation)

    def _activation(self, module: nn.Module, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Gate | None:
        for activation in _GATES:
            if self._same(module, _PlainGated(gate, up, down, activation), gate.in_features, gate.weight.dtype):
                return activation
        return None

    def _make_gated(
        self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, styles: list[str | None], activation: Gate
    ) -> nn.Module:
        (gate_FD, gate_bias_F), (up_FD, up_bias_F) = self._share(gate, styles[0]), self._share(up, styles[1])
        down_DF, down_bias_D = self._share(down, styles[2])
        bias_F = None if gate_bias_F is None or up_bias_F is None else torch.cat([gate_bias_F, up_bias_F])
        gate_up_FD = torch.cat([gate_FD, up_FD])
        self.num_weights += gate_up_FD.numel() + down_DF.numel()
        return GatedModule(
            self._operations.gated_linear(gate_up_FD, bias_F, gate=activation),
            self._operations.linear(down_DF, down_bias_D, self._ranks if styles[2] == ROWS else None),
        )

    def _same(self, one: nn.Module, other: nn.Module, num_inputs: int, dtype: torch.dtype) -> bool:
        generator = torch.Generator().manual_seed(0)
        x_1TD = torch.randn(1, _NUM_ROWS, num_inputs, generator=generator).to(dtype)
        try:
            expected = one(x_1TD)
        except (RuntimeError, TypeError, ValueError):
            return False  # it needs other arguments
        found = other(x_1TD.to(self._operations.device)).to(expected.device)
        if not isinstance(expected, Tensor) or expected.shape != found.shape or expected.dtype != found.dtype:
            return False
        error = (expected.float() - found.float()).abs().max()
        return bool(error <= _TOLERANCES[dtype] * expected.float().abs().max())

    # ---- vocabulary

    def _replace_vocabulary(self, is_tied: bool) -> None:
        """Divide the rows of the embedding and of the head over the ranks."""
        head, embedding, ranks = self._head, self._embedding, self._ranks
        if head is None or type(head) is not nn.Linear or head not in self._called:
            return
        head_VD = self._vocabulary_rows(head.weight.detach())
        bias_V = _bias(head)
        bias_V = None if bias_V is None else self._vocabulary_rows(bias_V)
        self.num_weights += head_VD.numel()
        if ranks.size > 1 and type(embedding) is nn.Embedding:
            weight_VD = head_VD if is_tied else self._vocabulary_rows(embedding.weight.detach())
            weight_VD = weight_VD.to(self._operations.device)
            made = EmbeddingModule(weight_VD, ranks.rank * -(-len(embedding.weight) // ranks.size), ranks)
            self._set_wherever(embedding, made)
        if bias_V is None:
            linear = self._operations.head(head_VD.to(self._operations.device), is_tied=is_tied)
        else:
            linear = self._operations.linear(head_VD, bias_V)
        self._set_wherever(head, GatheredModule(linear, head.out_features, ranks))

    def _vocabulary_rows(self, weight_VX: Tensor) -> Tensor:
        """Return this rank's rows, with zeros where there are no more."""
        if self._ranks.size == 1:
            return weight_VX
        num_rows = -(-len(weight_VX) // self._ranks.size)
        start = self._ranks.rank * num_rows
        out_VX = weight_VX.new_zeros(num_rows, *weight_VX.shape[1:])
        own = weight_VX[start : start + num_rows]
        out_VX[: len(own)] = own
        return out_VX


class _PlainGated(nn.Module):
    """A gated network in plain torch, to compare with."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: Gate) -> None:
        super().__init__()
        self._layers = gate, up, down
        self._activation: Gate = activation

    def forward(self, x_1TD: Tensor) -> Tensor:
        gate, up, down = self._layers
        return down(gate_and_mul(self._activation, torch.cat([gate(x_1TD[0]), up(x_1TD[0])], dim=1)))[None]


def _bias(module: nn.Linear) -> Tensor | None:
    bias_O = cast("nn.Parameter | None", module.bias)  # torch's own type leaves None out
    return None if bias_O is None else bias_O.detach()


def _free(module: nn.Module) -> None:
    """Give up the memory of a module that was replaced, although a list still has it."""
    for each in module.modules():
        each._parameters.clear()  # pyright: ignore[reportPrivateUsage]
