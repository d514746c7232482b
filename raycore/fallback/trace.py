"""What a network asks of attention: a forward pass of a few tokens whose calls are recorded, and refused if need be.

Whatever a network asks that raycore's attention can't compute is an `Unsupported`, whose text says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from raycore.fallback.interface import TRACED, MaskFunction, answer_with, register
from raycore.fallback.library import autocast_is_off_on_meta

NUM_TOKENS = 7
_MAX_COMPARED = 1 << 23
"""Pairs of a query and a key that are compared with a window."""
_MAX_POSITIONS = 1 << 18
_KNOWN = {"s_aux", "position_ids", "cache_position", "position_embeddings"}
"""Arguments of attention that are tensors, and are read here or change nothing."""


class Unsupported(Exception):
    """The network can't be computed with raycore's attention. The text says why, and ends without a period."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of a forward pass. Heads are those that the rank computes."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float | None
    window: int | None
    """How many tokens a token sees, itself included. None: all before it."""
    sinks_N: Tensor | None

    @property
    def head_dim(self) -> int:
        """What both keys and values fit into."""
        return max(self.key_dim, self.value_dim)


@dataclass(frozen=True)
class Trace:
    """What a forward pass did."""

    calls: list[AttentionCall]
    called: frozenset[nn.Module]
    """The modules whose `forward` was called."""
    of_tokens: frozenset[nn.Module]
    """Those of them that got one row for each token, in every call."""
    outer: list[nn.Module]
    """Those of them that the network's own `forward` calls, in order."""
    num_logits: int


class _Masks:
    """The masks that the model has made in the forward pass that runs now."""

    def __init__(self) -> None:
        self.max_length = 0
        self.made: list[tuple[Tensor, int | Unsupported | None]] = []
        """Each with its window, or why a call can't have it."""

    def make(self, mask_function: MaskFunction, num_queries: int, num_keys: int) -> Tensor:
        """Return the mask of a sequence's first tokens, as numbers that are added to scores."""
        window: int | Unsupported | None
        try:
            window = _window(mask_function, self.max_length)
        except Unsupported as error:
            window = error  # perhaps no call gets this mask
        rows, columns = torch.arange(num_queries)[:, None], torch.arange(num_keys)
        is_seen = columns <= rows
        if isinstance(window, int):
            is_seen &= columns > rows - window
        mask = torch.zeros(1, 1, num_queries, num_keys).masked_fill_(~is_seen, torch.finfo(torch.float32).min)
        self.made.append((mask, window))
        return mask

    def window_of(self, mask: Any) -> int | None:
        """Return the window of a mask that a call got."""
        if not isinstance(mask, Tensor):
            raise Unsupported("attends without a mask of transformers, so not causally")
        found = [window for made, window in self.made if mask is made] or [
            window for made, window in self.made if mask.device == made.device and _same(mask, made)
        ]
        if len(set(found)) != 1:
            raise Unsupported("its attention has a mask or a bias of its own, not only a causal or a sliding one")
        if isinstance(found[0], Unsupported):
            raise found[0]
        return found[0]


_masks = _Masks()


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape[-2:] == other.shape[-2:] and torch.equal(one.broadcast_to(other.shape), other)


def _window(mask_function: MaskFunction, max_length: int) -> int | None:
    """Return the window of a causal mask for sequences of up to `max_length` tokens. None: it has none."""
    length = min(max_length, _MAX_POSITIONS)
    keys = torch.arange(length)
    num_queries = min(length, max(16, _MAX_COMPARED // length))
    queries = torch.linspace(0, length - 1, num_queries).long()[:, None]
    try:
        zero = torch.zeros(1, dtype=torch.long).view(1, 1, 1, 1)
        is_seen = mask_function(zero, zero, queries[None, None], keys[None, None, None])
        is_seen = is_seen.broadcast_to(1, 1, num_queries, length)[0, 0].to("cpu")
    except Exception as error:  # transformers' and models' functions may raise anything
        raise Unsupported(f"its mask of attention isn't a function of positions ({error})") from error
    num_seen = int(is_seen[-1].sum())
    window = None if num_seen == length else num_seen
    expected = keys <= queries
    if window is not None:
        expected &= keys > queries - window
    if not torch.equal(is_seen.bool(), expected):
        raise Unsupported("its mask of attention is neither causal nor a sliding window")
    return window


class _CalledModules:
    """Notes which modules of a network are called."""

    def __init__(self, network: nn.Module, num_tokens: int) -> None:
        self.called: set[nn.Module] = set()
        self.others: set[nn.Module] = set()
        """Those that got something else than one row for each token."""
        self._num_tokens = num_tokens
        self.outer: list[nn.Module] = []
        self._depth = 0
        self._hooks = [module.register_forward_pre_hook(self._enter) for module in network.modules()]
        self._hooks += [module.register_forward_hook(self._leave, always_call=True) for module in network.modules()]

    def _enter(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._depth == 1:
            self.outer.append(module)
        self._depth += 1
        self.called.add(module)
        x = arguments[0] if arguments else None
        if not isinstance(x, Tensor) or x.shape[:-1].numel() != self._num_tokens:
            self.others.add(module)

    def _leave(self, *_: Any) -> None:
        self._depth -= 1

    def remove(self) -> None:
        """Note nothing more."""
        for hook in self._hooks:
            hook.remove()


class _Guesses(TorchDispatchMode):
    """Has code go on that asks for values of tensors on `meta`, which have none.

    A condition holds, and one element of each tensor isn't zero. What follows from it is only a guess: workers trace
    the network again with its weights.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.device.type == "meta":
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
                return first.dtype == torch.bool or (0.0 if first.dtype.is_floating_point else 0)
            if func is torch.ops.aten.nonzero.default:
                return first.new_empty(1, first.ndim, dtype=torch.long)
        return func(*args, **kwargs or {})


class _Recorder:
    """Answers with zeros, and notes what was asked."""

    def __init__(self, num_tokens: int) -> None:
        self.calls: list[AttentionCall] = []
        self._num_tokens = num_tokens

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, arguments: dict[str, Any]
    ) -> Tensor:
        _check_arguments(module, arguments)
        _check_shapes(query, key, value, self._num_tokens)
        scale, softcap, sinks_N = (arguments.get(name) for name in ("scaling", "softcap", "s_aux"))
        if scale is None:
            scale = 1.0 / math.sqrt(query.shape[3])
        if not isinstance(scale, int | float):
            raise Unsupported("its attention has a scale that isn't a number")
        self.calls.append(
            AttentionCall(
                module,
                query.shape[1],
                key.shape[1],
                key.shape[3],
                value.shape[3],
                float(scale),
                None if softcap is None else float(softcap),
                _masks.window_of(mask),
                None if sinks_N is None else sinks_N.detach(),
            )
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def _check_arguments(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    if arguments.get("dropout"):
        raise Unsupported("its attention drops out scores")
    unknown = sorted(name for name, value in arguments.items() if isinstance(value, Tensor) and name not in _KNOWN)
    if unknown:
        raise Unsupported(f"its attention has {', '.join(unknown)}, which raycore's doesn't know")
    sinks_N = arguments.get("s_aux")
    if sinks_N is not None and sinks_N.ndim != 1:
        raise Unsupported("its attention has sinks that aren't one number for each head")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, num_tokens: int) -> None:
    if query.ndim != 4 or len(query) != 1 or query.shape[2] != num_tokens:
        raise Unsupported(f"its attention gets queries of shape {tuple(query.shape)}, not one sequence's")
    if key.shape[2] != num_tokens or value.shape[2] != num_tokens:
        raise Unsupported("its attention gets keys that aren't those of its tokens")
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        raise Unsupported(
            f"its attention has {query.shape[1]} query, {key.shape[1]} key and {value.shape[1]} value heads"
        )
    if query.shape[3] != key.shape[3]:
        raise Unsupported("its query and key heads have different sizes")


def trace(network: Any, max_length: int, num_tokens: int = NUM_TOKENS) -> Trace:
    """Return what a forward pass of `network` did, on whichever device, also on `meta`.

    Args:
        max_length: maximum number of tokens of a sequence, up to which masks are examined.
        num_tokens: of the pass.

    Raises:
        Unsupported: the network asks for what raycore's attention can't do, or can't be run like this.
    """
    register(_masks.make)
    recorder, modules = _Recorder(num_tokens), _CalledModules(network, num_tokens)
    _masks.max_length, _masks.made = max_length, []
    network.set_attn_implementation(TRACED)
    answer_with(network, recorder)
    try:
        with ExitStack() as stack:
            if network.device.type == "meta":
                network.set_experts_implementation("eager")  # others aren't made for this device
                stack.enter_context(autocast_is_off_on_meta())
                stack.enter_context(_Guesses())
            logits = run(network, torch.arange(1, num_tokens + 1), torch.arange(num_tokens))
    except Unsupported:
        raise
    except Exception as error:  # models' code may raise anything
        # masks are on the host, also those of a network that is nowhere
        is_of_masks = isinstance(error, RuntimeError) and "cpu" in str(error) and "meta" in str(error)
        why = "it computes with the masks of attention itself" if is_of_masks else "a forward pass failed"
        raise Unsupported(f"{why}: {type(error).__name__}: {first_line(error)}") from error
    finally:
        modules.remove()
        _masks.made = []
    if not recorder.calls:
        raise Unsupported("its attention doesn't go through transformers' attention interface")
    of_tokens = frozenset(modules.called - modules.others)
    return Trace(recorder.calls, frozenset(modules.called), of_tokens, modules.outer, logits.shape[-1])


def run(network: Any, token_ids_T: Tensor, positions_T: Tensor | None) -> Tensor:
    """Return the logits [T, V] of a forward pass. `positions_T` None: the network's own, from 0."""
    device = network.device
    positions = {} if positions_T is None else {"position_ids": positions_T.to(device)[None]}
    # in inference mode, `_Guesses` wouldn't see what code asks for
    with torch.no_grad():
        return network(input_ids=token_ids_T.to(device)[None], use_cache=False, return_dict=True, **positions).logits[0]


def first_line(error: BaseException) -> str:
    """Return the beginning of an error's text."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""
