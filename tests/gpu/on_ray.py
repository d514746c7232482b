"""Runs engines on Ray with a GPU: tokens, ranks that share it and die, and weights that come while they serve.

    python -m tests.gpu.on_ray
    python -m tests.gpu.on_ray --device cpu

Two ranks and a trainer, which is a Ray actor, share the first GPU. The trainer's weights come by Ray's object store, by
CUDA's IPC handles, and from files, and a rank is killed between two updates. Then the ranks sleep, lose their weights,
and are filled by the trainer. After each update, answers are those of an engine in this process that has started with
the same weights, which a line beginning with ok or FAILED says. Needs Ray, but no network. Exits with 1 if one failed.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# isort: off
import raycore.worker.openmp  # noqa: F401  # before torch: sets the environment of its OpenMP

# isort: on
import ray
import torch
from common import let_processes_import
from safetensors.torch import load_file

from gpu.checks import NUM_NEW_TOKENS
from gpu.engines import Device, engine, generate, prompts, write_checkpoint
from gpu.weights import changed
from raycore import LLM, SamplingParams
from raycore.outputs import RequestOutput
from raycore.parts.weights.transfer.trainer import send_weights_cuda_ipc, send_weights_ray

FAMILY = "qwen3"
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "batch_invariant": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 128,
}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, detokenize=False)
RANKS = 2
RANK_S = 60.0
"""How long a rank's replacement may take."""


class Trainer:
    """An actor that has the weights of a checkpoint on its device, and sends them to an engine of its driver's."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}
        self._calls: list[dict[str, Any]] = []

    def load(self, path: str) -> None:
        """Read a checkpoint, over the weights that are there."""
        for name, tensor in load_file(Path(path) / "model.safetensors").items():
            if name in self._tensors:
                self._tensors[name].copy_(tensor)
            else:
                self._tensors[name] = tensor.to(self._device)

    def calls(self, way: str) -> list[dict[str, Any]]:
        """What `update_weights` gets. The weights stay as they are until the next `load`."""
        self._calls = []
        send = {"ray": send_weights_ray, "ipc": send_weights_cuda_ipc}[way]
        send(self._calls.append, self._tensors.items())
        return self._calls


def main() -> int:
    """Run it. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    device: Device = parser.parse_args().device
    num_gpus = int(device == "cuda")
    let_processes_import(Path(__file__).parents[1])
    ray.init(num_cpus=8, num_gpus=num_gpus, include_dashboard=False, object_store_memory=400_000_000)
    try:
        with tempfile.TemporaryDirectory(prefix="raycore_gpu_") as directory:
            return int(not _run(device, Path(directory)))
    finally:
        ray.shutdown()


def _run(device: Device, directory: Path) -> bool:
    first = write_checkpoint(FAMILY, directory / FAMILY)
    second = changed(first, directory / "changed")
    expected = {path: _answers_here(path, device) for path in (first, second)}
    trainer: Any = ray.remote(Trainer).options(num_cpus=1, num_gpus=0.1 * (device == "cuda")).remote(device)
    shared: dict[str, Any] = {"gpus_per_worker": 0.4, "gpu_memory_utilization": 0.2} if device == "cuda" else {}
    results: list[bool] = []
    for way in ("ray", "ipc") if device == "cuda" else ("ray",):
        options = SIZES | shared | {"data_parallel_size": RANKS, "weight_transfer_config": {"backend": way}}
        with LLM(str(first), device=device, skip_tokenizer_init=True, **options) as llm:
            check = functools.partial(_check, llm, expected, results)
            check(f"{way}, two ranks", first)
            for index, path in enumerate((second, first, second)):
                _update(llm, trainer, way, path)
                check(f"{way}, update {index}", path)
                rank = index % RANKS
                os.kill(next(info.pid for info in llm.engine_infos if info.dp_rank == rank), signal.SIGKILL)
                check(f"{way}, rank {rank} killed after update {index}", path)
                _wait_for_ranks(llm)
                check(f"{way}, rank {rank} replaced", path)
            llm.reload_weights(str(first))
            check(f"{way}, from files", first)
            llm.sleep(level=2)
            llm.wake_up(["weights"], reads_weights=False)
            _update(llm, trainer, way, second)
            llm.wake_up(["kv_cache"])
            check(f"{way}, slept, and filled by the trainer", second)
    return all(results)


def _check(llm: LLM, expected: dict[Path, list[list[int]]], results: list[bool], name: str, path: Path) -> None:
    started_s = time.monotonic()
    outputs = llm.generate(prompts() * 2, GREEDY, use_tqdm=False)
    num_equal = sum(map(list.__eq__, map(_tokens, outputs), expected[path] * 2))
    results.append(num_equal == len(outputs))
    took_s = time.monotonic() - started_s
    print(
        f"{'ok' if results[-1] else 'FAILED'} {name}: {num_equal} of {len(outputs)} answers, {took_s:.1f} s", flush=True
    )


def _wait_for_ranks(llm: LLM) -> None:
    """Wait until all ranks serve. If both were lost, nobody would have the trainer's weights."""
    deadline_s = time.monotonic() + RANK_S
    while states := {rank.state for rank in llm.ranks} - {"serving"}:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"ranks are {', '.join(states)}, not serving, after {RANK_S:g} s")
        time.sleep(0.1)


def _update(llm: LLM, trainer: Any, way: str, path: Path) -> None:
    ray.get(trainer.load.remote(str(path)), timeout=60)
    started_s = time.monotonic()
    llm.start_weight_update()
    for info in ray.get(trainer.calls.remote(way), timeout=60):
        llm.update_weights({"update_info": info})
    llm.finish_weight_update(path.name)
    print(f"   an update by {way}: {(time.monotonic() - started_s) * 1e3:.0f} ms", flush=True)


def _tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def _answers_here(path: Path, device: Device) -> list[list[int]]:
    with engine(path, device, **SIZES) as core:
        return [each.token_ids for each in generate(core, [(prompt, GREEDY) for prompt in prompts()])]


if __name__ == "__main__":
    sys.exit(main())
