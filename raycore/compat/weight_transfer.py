"""What trainers' scripts import of vLLM's weight transfer. `raycore.parts.weights.transfer.trainer` sends the weights.

The workers' side isn't here: the engine's option `weight_transfer_config` names a way.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from raycore.errors import InvalidConfig, RaycoreError
from raycore.parts.weights.transfer.buckets import PACKED_BYTES
from raycore.parts.weights.transfer.trainer import (
    broadcast_weights,
    join_weight_group,
    send_weights_cuda_ipc,
    send_weights_shared_memory,
)

if TYPE_CHECKING:
    from torch import Tensor

    from raycore.parts.weights.transfer.group import WeightGroup

    Weights = Iterable[tuple[str, Tensor]]

DEFAULT_PACKED_BUFFER_SIZE_BYTES = PACKED_BYTES
DEFAULT_PACKED_NUM_BUFFERS = 2
_TIMEOUT_S = 300.0
"""How long the engine may take to answer, and the workers to come."""


@dataclass
class NCCLWeightTransferInitInfo:
    """How the workers join a group with the trainer."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class NCCLWeightTransferUpdateInfo:
    """What the trainer broadcasts."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool = False
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS


@dataclass
class NCCLTrainerSendWeightsArgs:
    """How the trainer broadcasts. `stream` and `packed_num_buffers` have no effect."""

    group: Any
    src: int = 0
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor] | None = None
    packed: bool = False
    stream: object = None
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: int = DEFAULT_PACKED_NUM_BUFFERS


class NCCLWeightTransferEngine:
    """The trainer's side of broadcasts, for `weight_transfer_config={"backend": "nccl"}`."""

    @staticmethod
    def trainer_init(init_info: NCCLWeightTransferInitInfo | Mapping[str, Any]) -> WeightGroup:
        """Wait until all workers have joined. The engine's `init_weight_transfer_engine` tells them the address. The
        trainer has rank 0.

        Raises:
            InvalidConfig: `master_address`, `master_port` or `world_size` is missing.
            RaycoreError: the workers haven't joined within 300 s.
        """
        given: Mapping[str, Any] = init_info if isinstance(init_info, Mapping) else asdict(init_info)
        missing = [name for name in ("master_address", "master_port", "world_size") if name not in given]
        if missing:
            raise InvalidConfig(f"trainer_init(): init_info has no {', '.join(missing)}")
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        address, port, size = given["master_address"], int(given["master_port"]), int(given["world_size"])
        return join_weight_group(address, port, size, _TIMEOUT_S, device)

    @staticmethod
    def trainer_send_weights(iterator: Weights, trainer_args: NCCLTrainerSendWeightsArgs | Mapping[str, Any]) -> None:
        """Broadcast weights, while the engine's `update_weights` announces the same ones in the same order.

        Raises:
            InvalidConfig: `src` isn't 0.
            RaycoreError: a worker is gone, or doesn't take part.
        """
        args = NCCLTrainerSendWeightsArgs(**trainer_args) if isinstance(trainer_args, Mapping) else trainer_args
        if args.src != 0:
            raise InvalidConfig(f"src={args.src}: the trainer that sends has rank 0")
        of = args.post_iter_func
        weights = iterator if of is None else ((pair[0], of(pair)) for pair in iterator)
        broadcast_weights(args.group, weights, args.packed_buffer_size_bytes if args.packed else None)


@dataclass
class IPCWeightTransferInitInfo:
    """Nothing: memory that is shared needs no connection."""


@dataclass
class IPCTrainerSendWeightsArgs:
    """How the engine is told: by the actor `llm_handle` (`ray`), or at `url` (`http`)."""

    mode: str | None = None
    llm_handle: Any = None
    url: str | None = None
    send_mode: str | None = None
    """The same as `mode`, under its newer name."""
    packed: bool = False
    packed_buffer_size_bytes: int = DEFAULT_PACKED_BUFFER_SIZE_BYTES


class IPCWeightTransferEngine:
    """The trainer's side of shared memory, for `weight_transfer_config={"backend": "ipc"}`."""

    @staticmethod
    def trainer_init(init_info: object = None) -> None:
        """Nothing: memory that is shared needs no connection."""

    @staticmethod
    def trainer_send_weights(iterator: Weights, trainer_args: IPCTrainerSendWeightsArgs | Mapping[str, Any]) -> None:
        """Have the engine's workers on this GPU read weights where they are. A trainer without a GPU copies them into
        shared memory, for workers on its node.

        Trainers on several GPUs are the processes of torch.distributed's default group. Each of them has to call this,
        with the same whole tensors.

        Raises:
            InvalidConfig: it isn't said how the engine is told.
            RaycoreError: the server refuses the update, or there is no answer within 300 s.
        """
        args = IPCTrainerSendWeightsArgs(**trainer_args) if isinstance(trainer_args, Mapping) else trainer_args
        update = _update_of(args)
        if not torch.cuda.is_available():
            send_weights_shared_memory(update, iterator)
        elif args.packed:
            send_weights_cuda_ipc(update, iterator, args.packed_buffer_size_bytes, group=_trainers())
        else:
            send_weights_cuda_ipc(update, iterator, group=_trainers())


def _trainers() -> dist.ProcessGroup | None:
    """All trainers, if there are several."""
    are_several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if are_several else None


def _update_of(args: IPCTrainerSendWeightsArgs) -> Callable[[dict[str, Any]], object]:
    mode = args.send_mode or args.mode
    if mode == "ray" and args.llm_handle is not None:
        method = args.llm_handle.update_weights
        return lambda info: _result_of(method.remote({"update_info": info}))
    if mode == "http" and args.url is not None:
        url = f"{args.url.rstrip('/')}/update_weights"
        return lambda info: _post(url, {"update_info": _without_objects(info)})
    raise InvalidConfig(
        f"send_mode={mode!r}: give 'ray' and an llm_handle, or 'http' and a url. For other ways, use "
        "send_weights_cuda_ipc() of raycore.parts.weights.transfer.trainer"
    )


def _result_of(ref: Any) -> object:
    future = ref.future()
    try:
        return future.result(_TIMEOUT_S)
    except futures.TimeoutError:  # not Python's own before 3.11
        if future.done():  # the engine's own
            raise
        raise RaycoreError(
            f"the actor llm_handle hasn't answered update_weights() within {_TIMEOUT_S:g} s: see its log, and whether "
            "the engine's calls start_weight_update() and finish_weight_update() are around it"
        ) from None


def _without_objects(info: dict[str, Any]) -> dict[str, Any]:
    """The same for JSON: handles are objects of Python, which a server takes pickled."""
    handles = info.get("ipc_handles")
    if handles is None:
        return info
    pickled = base64.b64encode(pickle.dumps(handles)).decode()
    return {name: value for name, value in info.items() if name != "ipc_handles"} | {"ipc_handles_pickled": pickled}


def _post(url: str, body: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            response.read()
    except urllib.error.HTTPError as error:
        raise RaycoreError(f"POST {url}: status {error.code}: {error.read().decode(errors='replace')[:500]}") from None
    except OSError as error:
        raise RaycoreError(f"POST {url}: {error}") from error
