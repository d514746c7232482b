"""Replaces the numbers of weights in networks that run, by those of networks that the same code has made.

The objects stay, and so does whatever refers to them. Two networks are walked side by side: a tensor gets the numbers
of the tensor that has the same path in the other network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from raycore.errors import RaycoreError
from raycore.layers.lora import AdaptedLinear, Adapters
from raycore.layers.operations import TorchOperations
from raycore.weights.object_parts import named_parts
from raycore.weights.offload import SHARED

_NO_WEIGHTS = (*SHARED, TorchOperations, Adapters)


def replace_weights(old: object, new: object, label: str) -> None:
    """Give the tensors of `old` the numbers of those of `new`, which isn't used afterwards.

    On a GPU, numbers are copied: graphs know the addresses of tensors. On a CPU, the tensors of `old` take the memory
    of those of `new`, which may also have another dtype: some layers choose one that all numbers fit into.

    Args:
        label: what errors call `old`.

    Raises:
        RaycoreError: the two are of different shapes.
    """
    pairs = list(_matched(old, new, label))
    for path, into, source in pairs:
        if into.is_cuda and (into.shape, into.dtype) != (source.shape, source.dtype):
            raise RaycoreError(f"{path} is {_described(into)} and can't become {_described(source)}")
    with torch.inference_mode():
        for _, into, source in pairs:
            if into.is_cuda:
                into.copy_(source)
            else:
                into.data = source


def weight_tensors(root: object) -> dict[str, Tensor]:
    """Return all tensors with weights that can be reached from `root`, each once, by their paths."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        path, each = waiting.pop()
        each = _without_adapters(each)
        if each is None or id(each) in seen or isinstance(each, _NO_WEIGHTS):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            found[path] = each
        else:
            waiting += [(f"{path}.{name}", part) for name, part in named_parts(each)]
    return found


def checksum(tensors: dict[str, Tensor]) -> str:
    """Return a hash of the paths, shapes, dtypes and numbers of tensors, in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(tensors):
        tensor = dense(tensors[path])
        digest.update(f"{path} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor in the usual layout. oneDNN's own one can only be moved as a whole."""
    return tensor.to_dense() if tensor.is_mkldnn else tensor


def _matched(old: object, new: object, label: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the tensors of both that have the same paths: the path, the tensor of `old`, and that of `new`."""
    seen: set[int] = set()
    waiting: list[tuple[str, object, object]] = [(label, old, new)]
    while waiting:
        path, mine, other = waiting.pop()
        mine, other = _without_adapters(mine), _without_adapters(other)
        if mine is other or id(mine) in seen or isinstance(mine, _NO_WEIGHTS):
            continue
        seen.add(id(mine))
        if isinstance(mine, Tensor) and isinstance(other, Tensor):
            yield path, mine, other
        elif type(mine) is not type(other):
            raise RaycoreError(f"{path} is {_described(mine)} and can't become {_described(other)}")
        else:
            own = dict(named_parts(mine))
            for name, part in named_parts(other):
                if name not in own:
                    raise RaycoreError(f"{path} has no {name}, so it can't become {_described(part)}")
                waiting.append((f"{path}.{name}", own[name], part))


def _without_adapters(each: object) -> object:
    """Return what is under adapters, which aren't weights of the model."""
    return each._linear if isinstance(each, AdaptedLinear) else each  # pyright: ignore[reportPrivateUsage]


def _described(each: object) -> str:
    if isinstance(each, Tensor):
        return f"a tensor of shape {tuple(each.shape)} and type {each.dtype}"
    return f"a {type(each).__name__}"
