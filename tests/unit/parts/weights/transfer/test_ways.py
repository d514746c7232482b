"""A trainer's tensors come to a worker by each way that needs no Ray, whole and unchanged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from waiting import LONG_S

from raycore.compat.weight_transfer import (
    NCCLTrainerSendWeightsArgs,
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)
from raycore.errors import InvalidConfig, InvalidInput, RaycoreError
from raycore.node.listeners import listen
from raycore.node.ports import free_ports
from raycore.parts.weights.config import WeightTransferConfig, parse_weight_transfer_config
from raycore.parts.weights.transfer import trainer
from raycore.parts.weights.transfer.group import WeightGroup
from raycore.parts.weights.transfer.trainer import (
    MAX_BUCKETS,
    SharedBuckets,
    SharedWeights,
    join_weight_group,
    send_weights_distributed,
    send_weights_shared_memory,
)
from raycore.parts.weights.transfer.ways import Way, make_way

CPU = torch.device("cpu")
TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b": torch.randn(1000, 7),
    "c": torch.zeros(0, 3),
    "d": torch.tensor(5, dtype=torch.int32),
    "e": torch.randn(33).half(),
}


class Receiver:
    """A worker that keeps what comes."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.tensors: dict[str, Tensor] = {}
        self.num_calls = 0

    def update_weights(self, info: dict[str, Any]) -> None:
        self.num_calls += 1
        self.way.receive(info, self._load, self._check)

    def _check(self, described: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        for name, shape in described:
            if "layers." in name:
                continue
            if name not in TENSORS or tuple(TENSORS[name].shape) != shape:
                raise InvalidInput(f"no {name}")

    def _load(self, pairs: Sequence[tuple[str, Tensor]]) -> None:
        self.tensors |= {name: tensor.clone() for name, tensor in pairs}

    def check_all(self) -> None:
        assert self.tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert self.tensors[name].dtype == tensor.dtype
            assert torch.equal(self.tensors[name], tensor)


def receiver(backend: str, rank: int = 0, timeout_s: float = 20) -> Receiver:
    return Receiver(make_way(WeightTransferConfig(backend, timeout_s), rank, CPU))  # pyright: ignore


made: set[str] = set()
"""The names of all segments that a test has made. Those of tests in other processes don't count."""


class Segment(SharedMemory):
    """A segment that `segments` knows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        made.add(self.name)


@pytest.fixture(autouse=True)
def own_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "SharedMemory", Segment)
    made.clear()


def segments() -> set[str]:
    """Those that are there."""
    return {name for name in made.copy() if Path("/dev/shm", name).exists()}


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_shared_memory_brings_tensors_and_nothing_is_left_of_it(bucket_bytes: int) -> None:
    worker = receiver("ipc")
    send_weights_shared_memory(worker.update_weights, TENSORS.items(), bucket_bytes)
    worker.check_all()
    assert worker.num_calls == 1 if bucket_bytes > 64 else 2 <= worker.num_calls <= 4
    assert not segments()

    def fail(info: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        send_weights_shared_memory(fail, TENSORS.items())
    assert not segments()


def send_in_buckets(weights: Iterator[tuple[str, Tensor]]) -> None:
    send_weights_shared_memory(lambda info: None, weights)


@pytest.mark.parametrize("send", [send_in_buckets, SharedWeights])
def test_weights_that_cannot_be_copied_leave_nothing_in_shared_memory(send: Callable[..., object]) -> None:
    weights = {"a": TENSORS["a"], "b": torch.empty(3, device="meta")}
    with pytest.raises(NotImplementedError, match="meta"):
        send(iter(weights.items()))
    assert not segments()


def test_segments_are_used_again_and_are_few() -> None:
    worker, names = receiver("ipc"), set[str]()

    def update(info: dict[str, Any]) -> None:
        names.update(segments())
        worker.update_weights(info)

    with SharedBuckets(64) as buckets:
        for factor in (1, 2, 3):
            buckets.send(update, ((f"layers.{index}.x", torch.full((16,), index * factor)) for index in range(20)))
            assert {name: int(each[0]) for name, each in worker.tensors.items()} == {
                f"layers.{index}.x": index * factor for index in range(20)
            }
    assert 0 < len(names) <= MAX_BUCKETS
    assert not segments()


def test_workers_see_another_segment_with_the_name_of_one_before(tmp_path: Path) -> None:
    worker, segment = receiver("ipc"), Path("/dev/shm") / f"test_{tmp_path.name}"
    info = {"segments": [{"name": segment.name, "layout": [("layers.0.x", "uint8", (2,), 0)]}]}
    try:
        for content in (b"ab", b"cd"):
            segment.unlink(missing_ok=True)
            segment.write_bytes(content)
            worker.update_weights(info)
            assert bytes(worker.tensors["layers.0.x"].tolist()) == content
    finally:
        segment.unlink()


def test_weights_that_live_in_shared_memory_are_read_there() -> None:
    worker = receiver("ipc")
    with SharedWeights(TENSORS.items()) as shared:
        shared.send(worker.update_weights)
        worker.check_all()
        shared.tensors["b"] += 1
        shared.send(worker.update_weights)
        assert torch.equal(worker.tensors["b"], TENSORS["b"] + 1)
    assert not segments()
    assert torch.equal(shared.tensors["a"], TENSORS["a"]), "a trainer may still have them"


def test_files_bring_tensors(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    worker = receiver("disk")
    worker.update_weights({"path": str(tmp_path)})
    worker.check_all()
    save_file({"a": TENSORS["a"], "other": TENSORS["b"]}, tmp_path / "model.safetensors")
    worker.tensors.clear()
    with pytest.raises(InvalidInput, match="no other"):
        worker.update_weights({"path": str(tmp_path)})
    assert not worker.tensors, "all names are checked first"


def test_files_bring_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    scales = torch.tensor([0.5, 4.0]).to(torch.float8_e8m0fnu)
    save_file({"layers.0.weight_scale": scales}, tmp_path / "model.safetensors")
    worker = receiver("disk")
    worker.update_weights({"path": str(tmp_path)})
    found = worker.tensors["layers.0.weight_scale"]
    assert found.dtype == scales.dtype
    assert found.float().tolist() == [0.5, 4.0]


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
def test_broadcasts_bring_tensors_to_all_workers(bucket_bytes: int) -> None:
    with joined_workers(2, 20) as (group, workers), ThreadPoolExecutor(2) as pool:

        def update(update_info: dict[str, Any]) -> None:
            list(pool.map(lambda worker: worker.update_weights(update_info), workers))

        send_weights_distributed(group, update, TENSORS.items(), bucket_bytes)
        for worker in workers:
            worker.check_all()
        single = {"names": ["e"], "dtype_names": ["float16"], "shapes": [[33]]}
        call = threading.Thread(target=update, args=(single,))
        call.start()
        group.broadcast(TENSORS["e"] + 1)
        call.join(LONG_S)
        assert torch.equal(workers[1].tensors["e"], TENSORS["e"] + 1)


@pytest.mark.parametrize("chosen", [{}, {"packed": True}, {"packed": True, "packed_buffer_size_bytes": 64}])
def test_one_call_announces_all_tensors_that_vllms_trainers_broadcast(chosen: dict[str, Any]) -> None:
    with joined_workers(2, 20) as (group, workers), ThreadPoolExecutor(2) as pool:
        info = NCCLWeightTransferUpdateInfo(
            list(TENSORS),
            [str(tensor.dtype).removeprefix("torch.") for tensor in TENSORS.values()],
            [list(tensor.shape) for tensor in TENSORS.values()],
            **chosen,
        )
        calls = [pool.submit(worker.update_weights, asdict(info)) for worker in workers]
        args = NCCLTrainerSendWeightsArgs(group=group, **chosen)
        NCCLWeightTransferEngine.trainer_send_weights(iterator=iter(TENSORS.items()), trainer_args=args)
        for call, worker in zip(calls, workers, strict=True):
            call.result(LONG_S)
            worker.check_all()


@pytest.mark.parametrize("size", [0, -1, None, True, "1 GiB"])
def test_a_size_of_buckets_that_isnt_one_is_refused_by_name(size: Any) -> None:
    announced = {"names": ["e"], "dtype_names": ["float16"], "shapes": [[33]], "packed": True}
    with joined_workers(1, 20) as (_, (worker,)), pytest.raises(InvalidInput, match="packed_buffer_size_bytes="):
        worker.update_weights(announced | {"packed_buffer_size_bytes": size})


def test_vllms_trainers_meet_workers_and_change_tensors_as_they_are_sent() -> None:
    worker = receiver("nccl")
    info = {"master_address": "127.0.0.1", "master_port": free_ports("127.0.0.1", 1)[0], "world_size": 2}
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(worker.way.connect, info | {"rank_offset": 1})
        group = NCCLWeightTransferEngine.trainer_init(info)
        joined.result(LONG_S)
        call = pool.submit(
            worker.update_weights, {"names": ["e"], "dtype_names": ["float16"], "shapes": [[33]], "packed": False}
        )
        args = {"group": group, "post_iter_func": lambda pair: pair[1] + 1}
        NCCLWeightTransferEngine.trainer_send_weights(iter([("e", TENSORS["e"])]), args)
        call.result(LONG_S)
    assert torch.equal(worker.tensors["e"], TENSORS["e"] + 1)
    worker.way.disconnect()
    group.close()
    with pytest.raises(InvalidConfig, match=r"trainer_init\(\): init_info has no master_port, world_size"):
        NCCLWeightTransferEngine.trainer_init({"master_address": "127.0.0.1"})
    with pytest.raises(InvalidConfig, match="src=1: the trainer that sends has rank 0"):
        NCCLWeightTransferEngine.trainer_send_weights([], {"group": None, "src": 1})


@contextmanager
def joined_workers(num_workers: int, timeout_s: float) -> Iterator[tuple[WeightGroup, list[Receiver]]]:
    """Workers in a group with a trainer, which waits this long for them."""
    workers = [receiver("nccl", rank) for rank in range(num_workers)]
    listener = listen("127.0.0.1")
    port, size = listener.getsockname()[1], num_workers + 1
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": size}
    with ThreadPoolExecutor(num_workers) as pool:
        joined = [pool.submit(worker.way.connect, info) for worker in workers]
        group = join_weight_group("127.0.0.1", listener, size, timeout_s)
        for each in joined:
            each.result()
    yield group, workers
    for worker in workers:
        worker.way.disconnect()
    group.close()


def test_a_trainer_does_not_wait_for_workers_that_have_refused_its_tensors() -> None:
    with joined_workers(1, 300) as (group, (worker,)):

        def update(update_info: dict[str, Any]) -> None:
            time.sleep(0.05)  # the broadcast has begun
            worker.update_weights(update_info)

        with pytest.raises(InvalidInput, match="no strange"):
            send_weights_distributed(group, update, [("strange", torch.zeros(3))])
        group.close()  # before the worker does


def test_a_trainer_does_not_wait_for_a_worker_that_the_update_goes_on_without() -> None:
    with joined_workers(2, 300) as (group, (worker, _)):
        with pytest.raises(RaycoreError, match="a member of the group didn't take part"):
            send_weights_distributed(group, worker.update_weights, TENSORS.items())
        worker.check_all()


def test_workers_wait_for_a_trainer_no_longer_than_the_option_says() -> None:
    worker = receiver("nccl", timeout_s=1)
    silent, listener = (listen("127.0.0.1") for _ in range(2))
    info = {"master_address": "127.0.0.1", "rank_offset": 1, "world_size": 2}
    with silent, pytest.raises(RaycoreError, match=r"haven't met at .* within 1 s: nobody answers at"):
        worker.way.connect(info | {"master_port": silent.getsockname()[1]})  # as at a port of another program
    info["master_port"] = listener.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(worker.way.connect, info)
        group = join_weight_group("127.0.0.1", listener, 2, 20)
        joined.result()
    with pytest.raises(RaycoreError, match="couldn't be broadcast"):
        worker.update_weights({"names": ["e"], "dtype_names": ["float16"], "shapes": [[33]]})
    group.close()


@pytest.mark.parametrize(
    ("backend", "info", "message"),
    [
        ("ipc", {}, "segments is missing, or isn't a list"),
        ("ipc", {"segments": [{"name": "../x", "layout": []}]}, "isn't the name of a segment"),
        ("ipc", {"segments": [{"name": "psm_none", "layout": []}]}, "can't be read on this node"),
        ("ipc", {"ipc_handles": []}, "of a GPU's memory, but this worker computes on cpu"),
        ("ipc", {"ipc_handles_pickled": ""}, "of a GPU's memory, but this worker computes on cpu"),
        ("disk", {"path": 1}, "path is missing, or isn't a str"),
        ("nccl", {"names": []}, r"init_weight_transfer_engine\(\) comes first"),
    ],
)
def test_invalid_information_is_refused(backend: str, info: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        receiver(backend).update_weights(info)


def test_entries_stay_in_their_buffer(tmp_path: Path) -> None:
    worker = receiver("ipc")
    segment = Path("/dev/shm") / f"test_{tmp_path.name}"
    segment.write_bytes(bytes(128))
    try:
        for entry in (
            ("a", "float32", (33,), 0),
            ("a", "float32", (1,), 126),
            ("a", "float32", (1,), -4),
            ("a", "x", (1,), 0),
        ):
            with pytest.raises(InvalidInput, match=r"isn't in its buffer|inside of an item|isn't the name of one"):
                worker.update_weights({"segments": [{"name": segment.name, "layout": [entry]}]})
    finally:
        segment.unlink()


def test_a_worker_is_a_member_of_the_world() -> None:
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    with pytest.raises(InvalidInput, match="this worker is rank 2 of world_size=2"):
        receiver("nccl", rank=1).way.connect(info)


def test_the_option_takes_vllms_form() -> None:
    assert parse_weight_transfer_config('{"backend": "ray"}') == WeightTransferConfig("ray")
    assert parse_weight_transfer_config({}) == WeightTransferConfig("nccl")
    with pytest.raises(InvalidConfig, match="backend"):
        parse_weight_transfer_config({"backend": "sparse_nccl"})
