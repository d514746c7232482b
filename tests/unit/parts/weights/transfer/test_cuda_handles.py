"""What a trainer sends of its GPU's memory is checked before it is opened. On a GPU, `benchmarks/gpu.py` opens it."""

from __future__ import annotations

import base64
import os
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from raycore.errors import InvalidInput
from raycore.parts.weights.transfer import ways
from raycore.parts.weights.transfer.cuda_handles import Handles, exported, handles_in, parts_of

FIELDS = (
    torch.Tensor,
    torch.Size([2, 3]),
    (3, 1),
    0,
    torch.storage.TypedStorage,
    torch.bfloat16,
    0,
    b"h" * 64,
    512,
    0,
    False,
    b"/torch_1_2_3",
    0,
    b"e" * 64,
    True,
)
HANDLES: Handles = {"GPU-1": FIELDS}
LIKES = {
    "a": torch.zeros(3, dtype=torch.bfloat16),
    "b": torch.zeros(2, 2),
    "c": torch.zeros(0, 4),
    "d": torch.zeros((), dtype=torch.int8),
    "e": torch.zeros(5, dtype=torch.float64),
}


def pickled(value: object) -> dict[str, Any]:
    return {"ipc_handles_pickled": base64.b64encode(pickle.dumps(value)).decode()}


def test_pickles_hold_what_vllms_trainers_send() -> None:
    assert handles_in({"ipc_handles": [HANDLES]}) == [HANDLES]
    assert handles_in(pickled([HANDLES, HANDLES])) == [HANDLES, HANDLES]
    assert handles_in(pickled(HANDLES)) == HANDLES
    parameter = {"GPU-1": (torch.nn.Parameter, *FIELDS[1:4], torch.UntypedStorage, *FIELDS[5:])}
    assert handles_in(pickled([parameter])) == [parameter]


class Code:
    """Something whose pickle runs code when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("never",)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (pickled([Code()]), "posix.mkdir isn't part of an IPC handle"),
        (pickled(torch.zeros(1)), r"torch\._utils\._rebuild_tensor_v2 isn't part of an IPC handle"),
        ({"ipc_handles_pickled": "!"}, "isn't base64"),
        ({"ipc_handles_pickled": 5}, "isn't base64"),
        ({"ipc_handles_pickled": "AAAA"}, "ipc_handles_pickled: "),
        ({"ipc_handles": [FIELDS]}, "expected a dict of what torch's reduce_tensor returns"),
        ({"ipc_handles": {"GPU-1": FIELDS[1:]}}, "expected a dict of what torch's reduce_tensor returns"),
        ({"ipc_handles": "x"}, "expected a dict of what torch's reduce_tensor returns"),
    ],
)
def test_anything_else_is_refused(info: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        handles_in(info)


def test_tensors_follow_each_other_in_a_buffer() -> None:
    tensors = {name: torch.randn(like.shape).mul(9).to(like.dtype) for name, like in LIKES.items()}
    buffer = torch.cat([each.reshape(-1).view(torch.uint8) for each in tensors.values()])
    buffer = torch.cat([buffer, torch.zeros(7, dtype=torch.uint8)])
    sizes = [each.nbytes for each in tensors.values()]
    found = dict(parts_of(buffer, list(LIKES.items()), sizes))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with pytest.raises(InvalidInput, match="aren't those of the shapes and dtype_names"):
        parts_of(buffer, list(LIKES.items()), [*sizes[:-1], 1])
    with pytest.raises(InvalidInput, match="63 bytes, but the buffer has only 9"):
        parts_of(buffer[:9], list(LIKES.items()), sizes)


def test_tensors_elsewhere_have_no_handles() -> None:
    with pytest.raises(InvalidInput, match="a tensor is on cpu: only memory of CUDA devices"):
        exported([torch.zeros(1)])


@pytest.fixture
def gpu_worker(monkeypatch: pytest.MonkeyPatch) -> ways.SameNode:
    """A worker on a GPU whose memory is what the handles hold."""

    class Stream:
        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(ways, "opened", lambda what, handles, device: handles["GPU-1"])
    monkeypatch.setattr(ways, "handles_in", lambda info: info["ipc_handles"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    return ways.SameNode(torch.device("cuda", 0), 1.0)


def announcement(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
        "shapes": [list(each.shape) for each in tensors.values()],
    }


def test_workers_load_what_handles_give(gpu_worker: ways.SameNode) -> None:
    come: list[tuple[str, Tensor]] = []
    described: list[tuple[str, tuple[int, ...]]] = []
    info = announcement(LIKES) | {"ipc_handles": [{"GPU-1": each} for each in LIKES.values()]}
    gpu_worker.receive(info, come.extend, described.extend)
    assert [name for name, _ in come] == [name for name, _ in described] == list(LIKES)
    assert all(tensor is like for (_, tensor), like in zip(come, LIKES.values(), strict=True))

    buffer = torch.cat([each.reshape(-1).view(torch.uint8) for each in LIKES.values()])
    sizes = [each.nbytes for each in LIKES.values()]
    come.clear()
    packed = announcement(LIKES) | {"ipc_handles": {"GPU-1": buffer}, "tensor_sizes": sizes}
    gpu_worker.receive(packed, come.extend, described.extend)
    assert [(name, tensor.shape, tensor.dtype) for name, tensor in come] == [
        (name, like.shape, like.dtype) for name, like in LIKES.items()
    ]


def test_tensors_are_what_was_announced(gpu_worker: ways.SameNode) -> None:
    info = announcement({"a": torch.zeros(2, 3)})
    for handles, message in (
        ([{"GPU-1": torch.zeros(3, 2)}], r"tensor 'a' is torch.float32 \[3, 2\] at its handle"),
        ([{"GPU-1": torch.zeros(2, 3).half()}], r"tensor 'a' is torch.float16 \[2, 3\] at its handle"),
        ([], "0 ipc_handles for 1 names"),
        ({"GPU-1": torch.zeros(24).byte()}, "tensor_sizes is missing"),
    ):
        with pytest.raises(InvalidInput, match=message):
            gpu_worker.receive(info | {"ipc_handles": handles}, pytest.fail, lambda described: None)
