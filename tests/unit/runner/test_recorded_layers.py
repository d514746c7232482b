"""Layers whose native operations are recorded compute what they compute without recordings."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from caches import cache_of
from families import FAMILIES, make_checkpoint
from native_kernels import needs_kernels
from safetensors.torch import load_file, save_file
from torch import Tensor

from raycore.config import resolve
from raycore.kernels import library
from raycore.messages import NewRequest, StepPlan
from raycore.runner.execution import BY_OPERATION
from raycore.runner.recorded_layers import RecordedLayers, _RecordedLayer
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import WorkerRank
from raycore.worker.worker import Worker

pytestmark = needs_kernels
ALONE = WorkerRank(dp_rank=0, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=1)
NUM_SEQS, PROMPT, NUM_STEPS = 3, 5, 6
NUM_BLOCKS = 3

STEPS = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from raycore.demo import demo_model_path
from test_recorded_layers import recorded, run, start
worker = start(demo_model_path())
for _ in run(worker): pass
assert all(recorded(worker))
print("torch._dynamo" in sys.modules)
"""


def start(path: Path, **options: Any) -> Worker:
    worker = Worker(resolve(str(path), **{"num_threads": 1, "max_model_len": 40} | options), ALONE)
    worker.init_device()
    worker.load_model()
    worker.initialize_cache(cache_of(worker, NUM_SEQS * NUM_BLOCKS))
    return worker


def ints(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def run(worker: Worker) -> Iterator[Tensor]:
    """Run steps of one, of two and of three sequences. Yield each one's logits."""
    found: list[Tensor] = []
    decoder = worker._core.model.network
    logits = decoder.logits
    decoder.logits = lambda hidden: found.append(logits(hidden)) or found[-1].clone()
    step = 0
    for slot in range(NUM_SEQS):
        prompt = np.arange(3 + slot, 3 + slot + PROMPT, dtype=np.int32).tobytes()
        blocks = np.arange(slot * NUM_BLOCKS, (slot + 1) * NUM_BLOCKS, dtype=np.int32).repeat(
            worker._core.num_cache_groups
        )
        new = NewRequest(slot, prompt, PROMPT, 0, blocks.tobytes(), SamplingParams(temperature=0.0), 0)
        worker.execute_model(StepPlan(step, ints(slot), ints(PROMPT), new_requests=[new]))
        for _ in range(NUM_STEPS):
            step += 1
            worker.execute_model(StepPlan(step, ints(*range(slot + 1))))
            yield found[-1]
    worker.execute_model(StepPlan(step + 1, freed_slots=list(range(NUM_SEQS))))
    del decoder.logits


def recorded(worker: Worker) -> list[bool]:
    """Of each layer, whether it is computed by its recording."""
    layers = worker._core.runner._execution
    return [not each._checks_left for each in layers._layers.values()] if isinstance(layers, RecordedLayers) else []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [family for family, toy in FAMILIES.items() if not toy.is_plain])
def test_recorded_layers_compute_the_same_bits(family: str, dtype: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    worker, plain = start(path, dtype=dtype), start(path, dtype=dtype)
    plain._core.runner._execution = BY_OPERATION
    for one, other in zip(run(worker), run(plain), strict=True):
        assert torch.equal(one, other)
    if family in ("qwen3", "starcoder2", "granite"):  # granite multiplies by torch's operations
        assert recorded(worker) == [family != "granite"] * worker.config.model.spec.num_layers
    worker.shutdown()
    plain.shutdown()


def test_layers_whose_parts_read_the_same_are_recorded(tmp_path: Path) -> None:
    worker = start(make_checkpoint("cohere", tmp_path, use_qk_norm=False))
    for _ in run(worker):
        pass
    assert recorded(worker) == [True, True]
    worker.shutdown()


def test_several_layers_are_replayed_at_once(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path, num_hidden_layers=6)
    worker, plain = start(path), start(path)
    plain._core.runner._execution = BY_OPERATION
    layers, counts = cast(RecordedLayers, worker._core.runner._execution), list[int]()
    replay = layers._replay
    layers._replay = lambda number, count, *tensors: counts.append(count) or replay(number, count, *tensors)
    for one, other in zip(run(worker), run(plain), strict=True):
        assert torch.equal(one, other)
    # in the prompt's step, the last layer computes one row to the end, without a recording
    assert counts[-2 - 2 * NUM_STEPS :] == [4, 1, *[4, 2] * NUM_STEPS]
    worker.shutdown()
    plain.shutdown()


def test_tapped_layers_are_replayed_apart(tmp_path: Path) -> None:
    worker = start(make_checkpoint("qwen3", tmp_path, num_hidden_layers=6))
    plain = list(run(worker))
    network, inputs = worker._core.model.network, list[Tensor]()
    forward = network.forward

    def tapped(*args: Any) -> Tensor:
        inputs.clear()
        taps = {layer: lambda h_TD: inputs.append(h_TD.clone()) for layer in (0, 1, 5)}
        return forward(*args[:4], taps, *args[5:])

    network.forward = tapped
    found: list[list[Tensor]] = []
    for execution in (worker._core.runner._execution, BY_OPERATION):
        worker._core.runner._execution = execution
        for one, other in zip(plain, run(worker), strict=True):
            assert torch.equal(one, other)
        found.append([*inputs])
    assert len(found[0]) == 3
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    worker.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recordings_compute_with_weights_that_have_changed(dtype: str, tmp_path: Path) -> None:
    first, second = (make_checkpoint("qwen3", tmp_path / name) for name in ("first", "second"))
    changed: dict[str, Tensor] = {}
    for file in second.glob("*.safetensors"):
        flipped = {name: each.flip(0).contiguous() for name, each in load_file(file).items()}
        save_file(flipped, file, {"format": "pt"})
        changed |= flipped
    worker = start(first, dtype=dtype)
    before = list(run(worker))
    assert all(recorded(worker))
    worker.load_weights(list(changed.items()))
    after = list(run(worker))
    fresh = start(second, dtype=dtype)
    assert all(torch.equal(one, other) for one, other in zip(after, run(fresh), strict=True))
    assert not torch.equal(before[-1], after[-1])
    worker.shutdown()
    fresh.shutdown()


def test_recordings_are_forgotten_with_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start(make_checkpoint("qwen3", tmp_path))
    before = list(run(worker))
    assert all(recorded(worker))
    forgotten: list[int] = []
    forget = library.delete_recording
    monkeypatch.setattr(library, "delete_recording", lambda number: forgotten.append(number) or forget(number))
    worker.sleep(1)
    gc.collect()
    assert len(forgotten) == worker.config.model.spec.num_layers
    worker.wake_up(["weights"])
    worker.initialize_cache(cache_of(worker, NUM_SEQS * NUM_BLOCKS))
    assert all(torch.equal(one, other) for one, other in zip(before, run(worker), strict=True))
    worker.shutdown()


def norms(weights: list[Tensor]) -> Any:
    """A layer that normalizes several times."""

    def layer(x: Tensor, _: Any) -> Tensor:
        for weight in weights:
            x = torch.ops.raycore.rms_norm(x, weight, 1e-6, 0.0)
        return x

    return layer


def test_replays_that_fail_keep_no_tensors() -> None:
    x, tables, sequences = torch.ones(4, 1000), torch.zeros(1, 1), torch.zeros(1, 4)
    weights = [torch.ones(1000) for _ in range(3)]
    layer: Any = _RecordedLayer(norms(weights))
    for _ in range(4):
        layer(x, None, (tables, sequences))
    assert not layer._checks_left
    owned = x, tables, sequences, *weights
    counts = [each._use_count() for each in owned]
    weights[2].data = torch.ones(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"a contiguous weight \[D\]"):
                layer(x, None, (tables, sequences))
    assert [each._use_count() for each in owned] == counts
    assert [event.cpu_memory_usage for event in profile.events() if event.name == "raycore::replay"] == [0, 0, 0]
    weights[2].data = torch.ones(1000)
    assert torch.equal(layer(x, None, (tables, sequences)), norms(weights)(x, None))


def test_layers_that_are_not_replayed_keep_no_tensors() -> None:
    """One fails, one calls an operation of torch, and one doesn't compute the same again."""
    x, tensors, weight, calls = torch.ones(4, 10), (torch.zeros(1, 1), torch.zeros(1, 4)), torch.ones(10), [0]

    def fails(x: Tensor, _: Any) -> Tensor:
        return norms([weight, weight[:5]])(x, None)

    def has_other_operations(x: Tensor, _: Any) -> Tensor:
        return norms([weight])(norms([weight])(x, None) + 1, None)

    def changes(x: Tensor, _: Any) -> Tensor:
        calls[0] += 1
        return torch.ops.raycore.rms_norm(x, weight, float(calls[0]), 0.0)

    count = weight._use_count()
    for layer in (_RecordedLayer(fails), _RecordedLayer(has_other_operations), _RecordedLayer(changes)):
        for _ in range(3):
            with suppress(RuntimeError):
                layer(x, cast(Any, None), tensors)
        assert weight._use_count() == count
        assert layer._checks_left


def test_recordings_need_none_of_torchs_compiler() -> None:
    """To import it takes a second of a worker's start."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, timeout=100)
    assert (ran.stdout, ran.stderr) == ("False\n", "")
