"""Finds calls of torch for which the host would wait for a GPU, also where tensors are on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

WAITING = {
    "item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique", "bincount", "synchronize",
    "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__", "equal", "allclose", "is_nonzero",
}  # fmt: skip


class NoWaiting(TorchFunctionMode):
    """While it is active, a call for which the host would have to wait for a GPU raises an AssertionError.

    Torch hides one such call: an index that is a tensor of zero dimensions, as in `x[x.argmax()]`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._host: set[int] = set()
        """Addresses of memory that is the host's: what was allocated so that it can be pinned."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        owner = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name in WAITING and (owner is None or owner.untyped_storage().data_ptr() not in self._host):
            raise AssertionError(f"{name}() waits for the device")
        if name in ("__getitem__", "__setitem__", "index_put_") and _has_mask(args[1]):
            raise AssertionError(f"{name}() with a mask waits for the device")
        if name == "to" and any(str(arg) == "cpu" for arg in (*args[1:], *kwargs.values()) if isinstance(arg, str)):
            raise AssertionError("to('cpu') waits for the device")
        result = func(*args, **kwargs)
        if name == "empty" and "pin_memory" in kwargs:
            self._host.add(result.untyped_storage().data_ptr())
        return result


def _has_mask(index: Any) -> bool:
    indexes = index if isinstance(index, tuple | list) else (index,)
    return any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in indexes)
