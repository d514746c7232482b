"""Tensors in the GPU's memory of another process, by CUDA's IPC handles. Forms are those of vLLM's trainers."""

from __future__ import annotations

# torch's reductions and devices are partially typed:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import base64
import binascii
import io
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from raycore.errors import InvalidInput

Handles = dict[str, tuple[Any, ...]]
"""By the GPU's UUID: what torch needs to open a tensor that is on this GPU."""
_IN_PICKLES = {
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch._tensor", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.storage", "TypedStorage"),
    ("torch.storage", "UntypedStorage"),
}
_NUM_FIELDS = 15
"""Of what `reduce_tensor` returns of a tensor in a GPU's memory."""
_CLASS, _DEVICE, _REQUIRES_GRAD = 0, 6, 10
"""Fields of it that don't come from the trainer."""


def exported(tensors: Iterable[Tensor]) -> list[Handles]:
    """Return handles of tensors in a GPU's memory. They are valid while the tensors exist.

    Raises InvalidInput if a tensor is elsewhere, or if its memory has no handle (torch's expandable segments).
    """
    handles: list[Handles] = []
    for tensor in tensors:
        if tensor.device.type != "cuda":
            raise InvalidInput(f"a tensor is on {tensor.device}: only memory of CUDA devices has IPC handles")
        try:
            _, fields = reduce_tensor(tensor)
        except RuntimeError as error:
            raise InvalidInput(f"the memory of a tensor on {tensor.device} has no IPC handle: {error}") from None
        handles.append({uuid_of(tensor.device): fields})
    return handles


def uuid_of(device: torch.device) -> str:
    """The UUID of a CUDA device, by which processes that number devices in other ways agree on it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def handles_in(update_info: Mapping[str, Any]) -> list[Handles] | Handles:
    """Return the handles in what a trainer has sent: one for each tensor, or the one of the buffer that has all.

    Raises InvalidInput if there are none, or if a pickle holds anything else than handles.
    """
    handles: Any = update_info.get("ipc_handles")
    if handles is None:
        try:
            pickled = base64.b64decode(update_info["ipc_handles_pickled"], validate=True)
            handles = _HandlesUnpickler(io.BytesIO(pickled)).load()
        except (binascii.Error, TypeError, ValueError) as error:
            raise InvalidInput(f"ipc_handles_pickled isn't base64: {error}") from None
        except Exception as error:  # a damaged pickle may raise anything
            raise InvalidInput(f"ipc_handles_pickled: {error}") from None
    entries: list[Any] = list(cast("list[Any]", handles)) if isinstance(handles, (list, tuple)) else [handles]
    for entry in entries:
        fields: list[Any] = list(cast("dict[Any, Any]", entry).values()) if isinstance(entry, dict) else [None]
        if not all(isinstance(each, (tuple, list)) and len(cast("list[Any]", each)) == _NUM_FIELDS for each in fields):
            raise InvalidInput(
                f"ipc_handles: expected a dict of what torch's reduce_tensor returns, by each GPU's UUID, got {entry!r}"
            )
    return entries if isinstance(handles, (list, tuple)) else cast("Handles", handles)


def opened(what: str, handles: Handles, device: torch.device) -> Tensor:
    """Return a tensor of another process, which shares its memory. `what` names it in errors.

    Raises InvalidInput if no handle is of `device`, or if it can't be opened, for example because its process is gone.
    """
    uuid = uuid_of(device)
    if uuid not in handles:
        raise InvalidInput(f"{what} has no handle of this worker's GPU {uuid}, only of {', '.join(handles)}")
    fields = list(handles[uuid])
    fields[_CLASS], fields[_REQUIRES_GRAD] = Tensor, False
    fields[_DEVICE] = device.index
    try:
        return rebuild_cuda_tensor(*fields)
    except Exception as error:  # CUDA's or torch's, by what the trainer has sent
        raise InvalidInput(f"the IPC handle of {what} can't be opened: {error}") from None


def parts_of(buffer: Tensor, likes: Sequence[tuple[str, Tensor]], sizes: Sequence[int]) -> list[tuple[str, Tensor]]:
    """Return the tensors that follow each other in a buffer of bytes, without gaps.

    Args:
        likes: by name, tensors with the shapes and types.
        sizes: in bytes.

    Raises:
        InvalidInput: the sizes aren't those of the tensors, or the buffer is too small.
    """
    memory = buffer.reshape(-1).view(torch.uint8)
    if list(sizes) != [like.nbytes for _, like in likes]:
        raise InvalidInput(f"tensor_sizes {list(sizes)} aren't those of the shapes and dtype_names, in bytes")
    if sum(sizes) > len(memory):
        raise InvalidInput(f"tensor_sizes are {sum(sizes)} bytes, but the buffer has only {len(memory)}")
    pairs: list[tuple[str, Tensor]] = []
    start = 0
    for name, like in likes:
        part = memory[start : start + like.nbytes]
        if (part.storage_offset() * part.itemsize) % like.itemsize:
            part = part.clone()  # views of other types begin at whole items
        pairs.append((name, part.view(like.dtype).view(like.shape)))
        start += like.nbytes
    return pairs


class _HandlesUnpickler(pickle.Unpickler):
    """Reads handles, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _IN_PICKLES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} isn't part of an IPC handle")
