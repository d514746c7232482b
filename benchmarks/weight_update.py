"""How long a full update of an engine's weights takes on one node by each way, beside a copy of the same bytes.

    python benchmarks/weight_update.py /path/of/checkpoint --tensor-parallel-size 2

The trainer is this process. Each round makes one update, and one copy of the tensors to other tensors that have been
written before, with torch's threads. Prints medians in milliseconds, their ratio, and the median ratio of the two in a
round, which counts where other programs run. The engine stays paused meanwhile. Ways are the backends of
`weight_transfer_config`, where `ipc` copies the tensors into shared memory, and `shared`: they live there. With
`--device cuda`, engine and trainer share a GPU, which has the tensors, and `cuda` sends IPC handles of them.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from raycore import LLM
from raycore.node.listeners import listen
from raycore.parts.weights.transfer.trainer import (
    SharedBuckets,
    SharedWeights,
    join_weight_group,
    send_weights_cuda_ipc,
    send_weights_distributed,
    send_weights_ray,
)

Update = Callable[[], None]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ways", help="default: ray,ipc,shared,nccl,disk; with --device cuda: ray,ipc,cuda,disk")
    args = parser.parse_args()
    ways = args.ways or {"cpu": "ray,ipc,shared,nccl,disk", "cuda": "ray,ipc,cuda,disk"}[args.device]
    tensors = read(Path(args.model), getattr(torch, args.dtype), args.device)
    num_bytes = sum(each.nbytes for each in tensors.values())
    print(f"{num_bytes / 1e6:.0f} MB in {args.dtype}, tensor_parallel_size={args.tensor_parallel_size}")
    options: dict[str, Any] = {
        "tensor_parallel_size": args.tensor_parallel_size,
        "dtype": args.dtype,
        "device": args.device,
        "max_model_len": 256,
    }
    if args.device == "cuda":
        options["gpu_memory_utilization"] = 0.5  # the rest is the trainer's
    for way in ways.split(","):
        backend = "ipc" if way in ("shared", "cuda") else way
        with (
            LLM(args.model, weight_transfer_config={"backend": backend}, **options) as llm,
            SharedBuckets() as buckets,
            SharedWeights(tensors.items() if way == "shared" else ()) as shared,
        ):
            updates = updates_by(way, llm, tensors, args, buckets, shared)
            rounds = measured(updates, tensors, args.rounds)
            took, copied = (statistics.median(column) for column in zip(*rounds, strict=True))
            ratio = statistics.median(update / copy for update, copy in rounds)
            print(
                f"{way}: {took:.0f} ms, {took / copied:.2f} of a copy ({copied:.0f} ms); in a round {ratio:.2f}",
                flush=True,
            )


def read(path: Path, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Return the checkpoint's tensors."""
    files = sorted(path.glob("*.safetensors"))
    return {name: each.to(device, dtype, copy=True) for file in files for name, each in load_file(file).items()}


def measured(update: Update, tensors: dict[str, Tensor], rounds: int) -> list[tuple[float, float]]:
    """Return each round's times of an update and of a copy, in milliseconds, after a round that doesn't count."""
    copies = {name: torch.zeros_like(each) for name, each in tensors.items()}

    def copy() -> None:
        for name, each in tensors.items():
            copies[name].copy_(each)
        if any(each.is_cuda for each in copies.values()):
            torch.cuda.synchronize()

    return [(timed(update), timed(copy)) for _ in range(rounds + 1)][1:]


def timed(run: Update) -> float:
    """Return how long a function takes, in milliseconds."""
    started_s = time.perf_counter()
    run()
    return (time.perf_counter() - started_s) * 1e3


def updates_by(
    way: str, llm: LLM, tensors: dict[str, Tensor], args: Any, buckets: SharedBuckets, shared: SharedWeights
) -> Update:
    """Return what updates all weights by a way, from `start_weight_update` to `finish_weight_update`."""

    def update_weights(info: dict[str, Any]) -> None:
        llm.update_weights({"update_info": info})

    sends: dict[str, Update] = {
        "ray": lambda: send_weights_ray(update_weights, tensors.items()),
        "ipc": lambda: buckets.send(update_weights, tensors.items()),
        "shared": lambda: shared.send(update_weights),
        "cuda": lambda: send_weights_cuda_ipc(update_weights, tensors.items()),
        "disk": lambda: update_weights({"path": args.model}),
    }
    if way == "nccl":
        listener = listen("127.0.0.1")
        port = listener.getsockname()[1]
        size = args.tensor_parallel_size + 1
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": size}
        call = threading.Thread(target=llm.init_weight_transfer_engine, args=({"init_info": info},))
        call.start()
        group = join_weight_group("127.0.0.1", listener, size)
        call.join()
        sends["nccl"] = lambda: send_weights_distributed(group, update_weights, tensors.items())

    def update() -> None:
        llm.start_weight_update()
        sends[way]()
        llm.finish_weight_update()

    return update


if __name__ == "__main__":
    main()
