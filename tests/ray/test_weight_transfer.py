"""A trainer's weights come to an engine with two workers by each way, and give the new checkpoint's tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from raycore import LLM, SamplingParams
from raycore.errors import InvalidInput
from raycore.node.listeners import listen
from raycore.parts.weights.transfer.trainer import (
    join_weight_group,
    send_weights_distributed,
    send_weights_ray,
    send_weights_shared_memory,
)

PROMPT = {"prompt_token_ids": list(range(3, 12))}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "tensor_parallel_size": 2,
    "num_threads": 1,
    "max_model_len": 200,
    "standby_delay_s": None,
}
SMALL = 40_000
"""Less than the tensors of a layer have."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("checkpoints")
    first = make_checkpoint("llama3", directory)
    second = directory / "second"
    second.mkdir()
    for file in first.iterdir():
        (second / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(1)
    tensors = {
        name: each + torch.randn_like(each) * 0.2 for name, each in load_file(first / "model.safetensors").items()
    }
    save_file(tensors, second / "model.safetensors", {"format": "pt"})
    return first, second


def tokens(llm: LLM) -> list[int]:
    return list(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids)


def by_broadcast(llm: LLM, tensors: dict[str, Tensor], path: Path) -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3}
    call = threading.Thread(target=llm.init_weight_transfer_engine, args=({"init_info": info},))
    call.start()
    group = join_weight_group("127.0.0.1", listener, 3, 60)
    call.join(60)
    llm.start_weight_update()
    send_weights_distributed(group, updating(llm), tensors.items(), SMALL)
    llm.finish_weight_update("two")
    llm.shutdown_weight_transfer_engine()
    group.close()


def updating(llm: LLM) -> Callable[[dict[str, Any]], None]:
    return lambda info: llm.update_weights({"update_info": info})


def sending(send: Callable[..., None]) -> Callable[[LLM, dict[str, Tensor], Path], None]:
    def update(llm: LLM, tensors: dict[str, Tensor], path: Path) -> None:
        llm.start_weight_update()
        send(updating(llm), tensors.items(), SMALL)
        llm.finish_weight_update("two")

    return update


def by_files(llm: LLM, tensors: dict[str, Tensor], path: Path) -> None:
    llm.start_weight_update()
    updating(llm)({"path": str(path)})
    llm.finish_weight_update("two")


WAYS = {
    "ray": sending(send_weights_ray),
    "ipc": sending(send_weights_shared_memory),
    "nccl": by_broadcast,
    "disk": by_files,
}


@pytest.mark.parametrize("backend", WAYS)
def test_an_engine_generates_what_the_new_checkpoint_does(
    ray_cluster: Any, backend: str, checkpoints: tuple[Path, Path], expected: tuple[list[int], list[int]]
) -> None:
    first, second = checkpoints
    with LLM(str(first), weight_transfer_config={"backend": backend}, **OPTIONS) as llm:
        assert tokens(llm) == expected[0]
        WAYS[backend](llm, load_file(second / "model.safetensors"), second)
        assert tokens(llm) == expected[1]
        assert llm.get_weight_version() == "two"
        checksums = llm.collective_rpc("weights_checksum")
        if backend == "ray":
            pieces = llm.collective_rpc("export_weights")
            llm.reload_weights(str(first))
            assert tokens(llm) == expected[0]
            llm.collective_rpc(take_own, args=(pieces,))
            llm.collective_rpc("release_exported_weights")
            assert llm.collective_rpc("weights_checksum") == checksums
            llm.start_weight_update()
            with pytest.raises(InvalidInput, match="the model has no tensor 'other'"):
                send_weights_ray(updating(llm), {"other": torch.zeros(1)}.items())
            llm.finish_weight_update()
            assert llm.collective_rpc("weights_checksum") == checksums


def take_own(worker: Any, pieces: list[list[dict[str, Any]]]) -> None:
    worker.import_weights(pieces[worker.rank.worker])


@pytest.fixture(scope="module")
def expected(ray_cluster: Any, checkpoints: tuple[Path, Path]) -> tuple[list[int], list[int]]:
    found: list[list[int]] = []
    for path in checkpoints:
        with LLM(str(path), **OPTIONS) as llm:
            found.append(tokens(llm))
    assert found[0] != found[1]
    return found[0], found[1]
