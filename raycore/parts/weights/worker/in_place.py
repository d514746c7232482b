"""Replaces the numbers of weights in networks that run, by those of networks that the same code has made.

The objects stay, and so does whatever refers to them. Two networks are walked side by side: a tensor gets the numbers
of the tensor that has the same path in the other network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from raycore.errors import RaycoreError
from raycore.layers.operations import Operations
from raycore.parts.adapters.layers import AdaptedLinear, Adapters
from raycore.weights.gathered import Unmade
from raycore.weights.object_parts import named_parts
from raycore.weights.offload import SHARED

_NO_WEIGHTS = (*SHARED, Operations, Adapters)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MixedNumbers(RaycoreError):
    """A number that is stored depends on tensors that have come, and on others that haven't."""


def replace_weights(old: object, new: object) -> None:
    """Give the tensors of `old` the numbers of those of `new`, which isn't used afterwards.

    They are copied, so that addresses stay, which graphs of a GPU know. On a CPU, a tensor may also get another dtype:
    some layers choose one that all numbers fit into. It then takes the memory of the new one.

    Raises:
        RaycoreError: the two are of different shapes.
    """
    pairs = list(_matched(old, new))
    for path, into, source in pairs:
        if into.is_cuda and (into.shape, into.dtype) != (source.shape, source.dtype):
            raise RaycoreError(f"{path} is {_described(into)} and can't become {_described(source)}")
    with torch.inference_mode():
        for _, into, source in pairs:
            if (into.shape, into.dtype) != (source.shape, source.dtype):
                into.data = source.made() if isinstance(source, Unmade) else source
            elif isinstance(source, Unmade):
                source.copy_to(into)
            else:
                into.copy_(source)


def replace_given(old: object, make: Callable[[float | None, float], object]) -> None:
    """Give the tensors of `old` the numbers that depend on some of a checkpoint's tensors, and keep all others.

    Which numbers these are is found out by changing the tensors: a number depends on those that change it.

    Args:
        make: returns what `old` would be. The first argument is the number that all tensors that have come consist of,
            or None for those that they have. The second one is the number that all others consist of. Layers must not
            choose the dtype of their weights by their numbers.

    Raises:
        MixedNumbers: a number depends on both. Nothing has changed.
        RaycoreError: networks are of different shapes.
    """
    with torch.inference_mode():
        for each in objects_of(old):
            _repack(each, shortens=False)
        try:
            _replace_given(old, make)
        finally:
            for each in objects_of(old):
                _repack(each, shortens=True)


def _replace_given(old: object, make: Callable[[float | None, float], object]) -> None:
    plain = _dense_by_path(old, make(0.0, 0.0))
    of_others = _differences(plain, _dense_by_path(old, make(0.0, 1.0)))
    of_given = _differences(plain, _dense_by_path(old, make(1.0, 0.0)))
    mixed = [path for path, depends in of_others.items() if (depends & of_given[path]).any()]
    if mixed:
        raise MixedNumbers(mixed[0])
    for path, into, source in list(_matched(old, make(None, 0.0))):
        if into.shape != source.shape or into.dtype != source.dtype:
            raise RaycoreError(f"{path} is {_described(into)} and can't become {_described(source)}")
        keeps = of_others[path]
        if not keeps.any():
            into.copy_(source)
        elif not keeps.all():
            _store(into, torch.where(keeps, _bits(dense(into)), _bits(dense(source))).view(source.dtype))


def _dense_by_path(old: object, new: object) -> dict[str, Tensor]:
    return {path: dense(source) for path, _, source in _matched(old, new)}


def _differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    for path, each in one.items():
        if each.shape != other[path].shape or each.dtype != other[path].dtype:
            raise MixedNumbers(path)  # how it is stored depends on the numbers
    return {path: _bits(each) != _bits(other[path]) for path, each in one.items()}


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.itemsize])


def _store(into: Tensor, numbers: Tensor) -> None:
    into.copy_(packed(numbers, into))


def _repack(each: Any, *, shortens: bool) -> None:
    if hasattr(each, "repack_"):
        each.repack_(shortens=shortens)


def objects_of(root: object) -> Iterator[object]:
    """Yield all that can be reached from `root` and may have weights, each once."""
    for _, each in _walk(root):
        yield each


def weight_tensors(root: object) -> dict[str, Tensor]:
    """Return all tensors with weights that can be reached from `root`, each once, by their paths."""
    return {path: each for path, each in _walk(root) if isinstance(each, Tensor)}


def checksum(tensors: dict[str, Tensor]) -> str:
    """Return a hash of the paths, shapes, dtypes and numbers of tensors, in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(tensors):
        tensor = dense(tensors[path])
        digest.update(f"{path} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor in the usual layout. oneDNN's own one can only be moved as a whole."""
    return tensor.to_dense() if tensor.is_mkldnn else tensor


def packed(numbers: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the layout of `like`: the inverse of `dense`."""
    return torch.ops.mkldnn._reorder_linear_weight(numbers, None) if like.is_mkldnn else numbers


def _walk(root: object) -> Iterator[tuple[str, object]]:
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        path, each = waiting.pop()
        each = _without_adapters(each)
        if each is None or id(each) in seen or isinstance(each, _NO_WEIGHTS):
            continue
        seen.add(id(each))
        yield path, each
        if not isinstance(each, Tensor):
            waiting += [(f"{path}.{name}", part) for name, part in named_parts(each)]


def _matched(old: object, new: object) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the tensors of both that have the same paths: the path, the tensor of `old`, and that of `new`."""
    seen: set[int] = set()
    waiting: list[tuple[str, object, object]] = [("", old, new)]
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
