"""Checks of weights that are replaced in a running engine on a device, for `benchmarks/gpu.py`."""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpu.checks import NUM_NEW_TOKENS, Checks, first_difference
from gpu.engines import Answer, engine, generate, make_core, prompts
from raycore.parts.weights.transfer.cuda_handles import exported
from raycore.parts.weights.transfer.trainer import send_weights_cuda_ipc, send_weights_shared_memory
from raycore.sampling_params import SamplingParams

FAMILIES = ("qwen3", "mixtral")
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
}
PACKED_ERROR = 5e-3
"""The largest difference of two log probabilities in float32 if one model's weights are packed."""
PROCESS_S = 60.0
"""How long a trainer's process may take to start, and for each of its calls."""

Call = Callable[..., Any]


def check_weights(checks: Checks) -> None:
    """After an update by each way, weights and answers are those of an engine that has read them from files."""
    with _Trainer() as trainer:
        for family in FAMILIES:
            for name, options in OPTIONS.items():
                title = f"{family}, weights in place, {name}"
                if name == "fp8" and family == "mixtral":
                    continue  # experts aren't quantized
                if not (name == "fp8" and checks.needs_gpu(title)):
                    checks.run(title, functools.partial(_check, checks, trainer, family, options))


def check_gguf(checks: Checks) -> None:
    """Tokens and log probabilities of GGUF files are those of the same numbers in a checkpoint, on the CPU."""
    if importlib.util.find_spec("gguf") is None:
        checks.report("skipped GGUF files: gguf isn't installed")
        return
    for kind in ("BF16", "Q8_0", "Q4_0", "Q5_1"):
        checks.run(f"GGUF file, {kind}", functools.partial(_check_gguf, checks, kind))


def _check_gguf(checks: Checks, kind: str) -> tuple[bool, str]:
    from gguf_files import write_gguf  # imported lazily: needs gguf

    file, numbers = checks.directory / f"{kind}.gguf", checks.directory / f"numbers of {kind}"
    write_gguf(checks.checkpoint("qwen3"), "qwen3", file, kind, plain=numbers)
    answers: list[list[Answer]] = []
    for path, device, backend in ((file, checks.device, "auto"), (numbers, "cpu", "torch")):
        with engine(path, device, attention_backend=backend) as core:
            answers.append(generate(core, _asked()))
    difference = first_difference(*answers, PACKED_ERROR)
    return difference is None, difference or f"{len(answers[0])} answers"


def _check(checks: Checks, trainer: _Trainer, family: str, options: dict[str, Any]) -> tuple[bool, str]:
    first = checks.checkpoint(family)
    second = changed(first, first.with_name(f"{family}_changed"))
    expected = {path: _fresh(checks, path, options) for path in (first, second)}
    wrong: list[str] = []
    ways = _ways(checks, trainer)
    core = make_core(first, checks.device, weight_transfer_config={"backend": "ipc"}, **options)
    try:
        call: Call = lambda method, *args: core.executor.collective_rpc(method, args=args)[0]  # noqa: E731
        generate(core, _asked())
        for index, (name, update) in enumerate(ways.items()):
            path = first if index % 2 else second
            call("start_weight_update")
            update(call, path)
            call("finish_weight_update")
            assert core.scheduler.reset_prefix_cache()
            if (call("weights_checksum"), generate(core, _asked())) != expected[path]:
                wrong.append(name)
    finally:
        core.shutdown()
    num_different = sum(one != other for one, other in zip(*(answers for _, answers in expected.values()), strict=True))
    figures = f"{len(ways) - len(wrong)} of {len(ways)} ways, wrong: {wrong}, answers that differ: {num_different} of 6"
    return not wrong and num_different > 0, figures


def _fresh(checks: Checks, path: Path, options: dict[str, Any]) -> tuple[str, list[Answer]]:
    core = make_core(path, checks.device, **options)
    try:
        return core.executor.collective_rpc("weights_checksum")[0], generate(core, _asked())
    finally:
        core.shutdown()


def _asked() -> list[tuple[list[int], SamplingParams]]:
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=2)
    return [(prompt, greedy) for prompt in prompts()]


def changed(path: Path, to: Path) -> Path:
    """Write a checkpoint of the same model with other numbers, unless it is there."""
    if to.exists():
        return to
    to.mkdir()
    (to / "config.json").write_bytes((path / "config.json").read_bytes())
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(path / "model.safetensors")
    for name, each in tensors.items():
        tensors[name] = each + 0.3 * each.abs().mean() * torch.randn(each.shape, generator=generator)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


# ---- ways


def _ways(checks: Checks, trainer: _Trainer) -> dict[str, Callable[[Call, Path], object]]:
    ways: dict[str, Callable[[Call, Path], object]] = {
        "tensors of the CPU": lambda call, path: call("load_weights", list(_stored(path, "cpu"))),
        "files": _by_files,
        "shared memory": lambda call, path: send_weights_shared_memory(_update(call), _stored(path, "cpu")),
        "layer by layer": lambda call, path: [call("load_weights", [pair]) for pair in _stored(path, "cpu")],
    }
    if checks.device == "cuda":
        ways |= {
            "tensors of the GPU": lambda call, path: call("load_weights", list(_stored(path, "cuda"))),
            "IPC handles": functools.partial(trainer.send, way="each"),
            "IPC handles in small buckets": functools.partial(trainer.send, way="buckets"),
            "an IPC handle of a buffer": functools.partial(trainer.send, way="buffer"),
        }
    return ways


def _stored(path: Path, device: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in load_file(path / "model.safetensors").items():
        yield name, tensor.to(device)


def _update(call: Call) -> Callable[[dict[str, Any]], object]:
    return lambda info: call("update_weights", info)


def _by_files(call: Call, path: Path) -> None:
    """`reload_from` is an update of its own."""
    call("cancel_weight_update")
    call("reload_from", str(path))
    call("start_weight_update")


class _Trainer:
    """Another process, which sends its GPU's memory. It is started when it is first needed."""

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Any = None

    def __enter__(self) -> _Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def send(self, call: Call, path: Path, way: str) -> None:
        """Send all weights of a checkpoint to a worker."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_train, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        self._connection.send((path, way))
        while (info := _received(self._connection)) is not None:
            call("update_weights", info)
            self._connection.send("read")


def _received(connection: Connection) -> Any:
    if not connection.poll(PROCESS_S):
        raise TimeoutError("the other process sends nothing")
    return connection.recv()


def _train(connection: Connection) -> None:
    """Run the trainer's process until it is killed. Its memory changes as soon as it has been read."""

    def update(info: dict[str, Any]) -> None:
        connection.send(info)
        assert _received(connection) == "read"

    while True:
        path, way = connection.recv()
        tensors = dict(_stored(path, "cuda"))
        if way == "buffer":
            _send_buffer(update, tensors)
        else:
            send_weights_cuda_ipc(update, tensors.items(), bucket_bytes=1 << 30 if way == "each" else 1 << 18)
        for each in tensors.values():
            each.zero_()
        torch.cuda.synchronize()
        connection.send(None)


def _send_buffer(update: Callable[[dict[str, Any]], object], tensors: dict[str, Tensor]) -> None:
    """Send one buffer that has all tensors, as vLLM's trainers do in their mode `packed`."""
    likes = list(tensors.values())
    buffer = torch.cat([each.reshape(-1).view(torch.uint8) for each in likes])
    update(
        {
            "names": list(tensors),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in likes],
            "shapes": [list(each.shape) for each in likes],
            "tensor_sizes": [each.nbytes for each in likes],
            "ipc_handles": exported([buffer])[0],
        }
    )
    buffer.zero_()
