"""Weights are replaced while a worker stays, and are then those of a worker that has read them from files."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from families import FAMILIES, make_checkpoint
from kernels import needs_kernels
from safetensors.torch import load_file, save_file
from torch import Tensor
from write_quantized import DIRECTORY

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.errors import InvalidInput
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.sampling_params import SamplingParams
from raycore.worker.groups import WorkerGroups
from raycore.worker.rank import RankIdentity, WorkerRank
from raycore.worker.setup import set_up
from raycore.worker.worker import Worker
from raycore.worker.worker_model import WorkerModel

ALONE = WorkerRank(dp_rank=0, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=1)
RUN_FAMILIES = ["llama3", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next", "granitemoehybrid", "qwen3"]
OPTIONS: list[dict[str, Any]] = [{}, {"attention_backend": "torch"}, {"batch_invariant": True}, {"enable_lora": True}]
QUANTIZED = sorted(each for each in DIRECTORY.iterdir() if each.is_dir())


def stored(path: Path) -> dict[str, Tensor]:
    return {name: each for file in sorted(path.glob("model*.safetensors")) for name, each in load_file(file).items()}


def changed(path: Path, to: Path, seed: int = 1) -> Path:
    """Write another checkpoint of the same model, with other numbers."""
    to.mkdir()
    generator = torch.Generator().manual_seed(seed)
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
            continue
        tensors = load_file(file)
        for name, each in tensors.items():
            if name.endswith(("qweight", "weight_packed")) or each.dtype == torch.int8:
                tensors[name] = each.flip(0).contiguous()
            elif each.is_floating_point():
                noise = torch.randn(each.shape, generator=generator) * 0.1
                tensors[name] = (each.float() + (noise.abs() if "scale" in name else noise)).to(each.dtype)
        save_file(tensors, to / file.name, {"format": "pt"})
    return to


def start(path: Path, rank: WorkerRank = ALONE, **options: Any) -> Worker:
    config = resolve(str(path), **{"num_threads": 1, "dtype": "float32"} | options)
    worker = Worker(config, rank.with_experts(config.parallel, None))
    worker.init_device()
    worker.load_model()
    return worker


def shuffled(tensors: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    pairs = list(tensors.items())
    random.Random(0).shuffle(pairs)
    return pairs


@pytest.mark.parametrize("family", list(FAMILIES))
def test_an_update_gives_what_a_fresh_load_does(family: str, tmp_path: Path) -> None:
    first = make_checkpoint(family, tmp_path)
    second = changed(first, tmp_path / "second")
    worker, expected = start(first), start(second).weights_checksum()
    assert worker.weights_checksum() != expected
    worker.load_weights(shuffled(stored(second)))
    assert worker.weights_checksum() == expected


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("family", ["llama3", "qwen3", "mixtral", "gemma3_multimodal", "deepseek_v3", "qwen3_next"])
def test_each_tensor_parallel_rank_takes_its_share(family: str, tp_rank: int, tmp_path: Path) -> None:
    first = make_checkpoint(family, tmp_path)
    second = changed(first, tmp_path / "second")
    rank = msgspec.structs.replace(ALONE, tp_rank=tp_rank, tp_size=2)
    worker, expected = (started_alone(path, rank, tensor_parallel_size=2) for path in (first, second))
    worker.load_weights(shuffled(stored(second)))
    assert worker.weights_checksum() == expected.weights_checksum()


def started_alone(path: Path, rank: WorkerRank, **options: Any) -> Worker:
    """A worker of several, whose results are never summed."""
    config = resolve(str(path), num_threads=1, dtype="float32", **options)
    worker = Worker(config, rank.with_experts(config.parallel, None))
    worker._setup = setup = set_up(config, worker.rank)
    groups = WorkerGroups()
    groups.ranks = TensorParallel(rank.tp_rank, rank.tp_size)
    worker._loaded = WorkerModel(setup, groups)
    worker.load_model()
    return worker


@pytest.mark.parametrize("pp_rank", [0, 1])
def test_each_stage_takes_its_layers(pp_rank: int, tmp_path: Path) -> None:
    for family in ("llama3", "qwen3"):  # with a tied head, and without
        first = make_checkpoint(family, tmp_path)
        second = changed(first, tmp_path / f"{family} 2")
        rank = msgspec.structs.replace(ALONE, pp_rank=pp_rank, pp_size=2)
        worker, expected = (started_alone(path, rank, pipeline_parallel_size=2) for path in (first, second))
        worker.load_weights(shuffled(stored(second)))
        assert worker.weights_checksum() == expected.weights_checksum()


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_a_rank_takes_only_its_own_experts(dp_rank: int, tmp_path: Path) -> None:
    first = make_checkpoint("qwen3_moe", tmp_path)
    second = changed(first, tmp_path / "second")
    rank = msgspec.structs.replace(ALONE, dp_rank=dp_rank)
    options = {"data_parallel_size": 2, "enable_expert_parallel": True}
    worker, expected = (started_alone(path, rank, **options) for path in (first, second))
    worker.load_weights(shuffled(stored(second)))
    assert worker.weights_checksum() == expected.weights_checksum()


class Engine:
    """An engine with one worker in this process."""

    def __init__(self, path: Path, **options: Any) -> None:
        sizes: dict[str, Any] = {
            "num_threads": 1,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 24,
            "num_gpu_blocks_override": 64,
        }
        config = resolve(str(path), **sizes | options)
        self._executor = InlineExecutor(config, RankIdentity(0, 1))
        self._core = EngineCore(config, self._executor)

    def call(self, method: str, *args: Any) -> Any:
        return self._executor.collective_rpc(method, args=args)[0]

    def logprobs(self) -> list[float]:
        """The log probabilities of a prompt's tokens."""
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
        self._core.submit(EngineRequest(0, "0", list(range(3, 20)), params, seed=0))
        found: list[float] = []
        while self._core.has_work():
            step = self._core.step()
            if step is not None:
                found += [each.logprobs[0] for _, _, entries in step.prompt_logprobs for each in entries]
        return found


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", RUN_FAMILIES)
def test_an_engine_that_has_run_computes_with_the_new_weights(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if family not in ("llama3", "qwen3") and options.get("enable_lora"):
        pytest.skip("one family for each kind of mixer is enough")
    first = make_checkpoint(family, tmp_path)
    second = changed(first, tmp_path / f"{family} 2")
    for dtype in ("float32", "bfloat16"):
        engine, fresh = (Engine(path, dtype=dtype, **options) for path in (first, second))
        before, expected = engine.logprobs(), fresh.logprobs()
        engine.call("load_weights", list(stored(second).items()))
        assert engine.call("weights_checksum") == fresh.call("weights_checksum")
        # torch's products depend on where in memory matrices are
        assert engine.logprobs() == pytest.approx(expected, abs=1e-4 if options.get("attention_backend") else 0)
        assert before != pytest.approx(expected, abs=1e-2)


@needs_kernels
def test_weights_in_8_bits_are_quantized_anew(tmp_path: Path) -> None:
    for family in ("llama3", "qwen3", "deepseek_v3_dense"):
        first = make_checkpoint(family, tmp_path)
        second = changed(first, tmp_path / f"{family} 2")
        worker, fresh = start(first, quantization="int8"), start(second, quantization="int8")
        worker.load_weights(shuffled(stored(second)))
        assert worker.weights_checksum() == fresh.weights_checksum()


@pytest.mark.parametrize("kind", [each.name for each in QUANTIZED])
def test_a_quantized_checkpoint_takes_updates_in_its_own_form(kind: str, tmp_path: Path) -> None:
    first = tmp_path / "first"
    shutil.copytree(DIRECTORY / kind, first)
    second = changed(first, tmp_path / "second")
    worker, fresh = start(first), start(second)
    assert worker.weights_checksum() != fresh.weights_checksum()
    worker.load_weights(shuffled(stored(second)))
    assert worker.weights_checksum() == fresh.weights_checksum()


def test_experts_may_come_stacked_or_one_by_one(tmp_path: Path) -> None:
    first = make_checkpoint("qwen3_moe", tmp_path)
    second = changed(first, tmp_path / "second")
    worker, expected = start(first), start(second).weights_checksum()
    tensors = stored(second)
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        num = len(
            {name.split(".experts.")[1].split(".")[0] for name in tensors if name.startswith(layer + ".experts.")}
        )
        parts = {
            kind: [tensors.pop(f"{layer}.experts.{n}.{kind}_proj.weight") for n in range(num)]
            for kind in ("gate", "up", "down")
        }
        both = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors |= {
            f"{layer}.experts.gate_up_proj": torch.stack(both),
            f"{layer}.experts.down_proj": torch.stack(parts["down"]),
        }
    worker.load_weights(shuffled(tensors))
    assert worker.weights_checksum() == expected


def test_names_and_shapes_are_checked_before_anything_changes(tmp_path: Path) -> None:
    path = make_checkpoint("llama3", tmp_path)
    worker, tensors = start(path), stored(path)
    before = worker.weights_checksum()
    name = "model.layers.1.self_attn.q_proj.weight"
    others = [(each, torch.zeros_like(tensor)) for each, tensor in tensors.items() if each != name]
    with pytest.raises(
        InvalidInput, match=r"tensor 'model.layers.1.self_attn.q_proj.weight' has shape \(64, 63\), but"
    ):
        worker.load_weights([*others, (name, tensors[name][:, 1:])])
    with pytest.raises(InvalidInput, match=r"the model has no tensor 'model.layers.1.self_attn.query.weight'"):
        worker.load_weights([*others, ("model.layers.1.self_attn.query.weight", tensors[name])])
    with pytest.raises(
        InvalidInput, match=r"q_proj.weight' has type torch.int64: expected float32, bfloat16 or float16"
    ):
        worker.load_weights([*others, (name, tensors[name].long())])
    assert worker.weights_checksum() == before
    assert worker.load_weights(
        [("lm_head.weight", torch.zeros(1)), ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(1))]
    )
    assert worker.weights_checksum() == before, "nobody reads a tied head, nor what rotations are made of"


def test_an_update_waits_for_the_tensors_of_a_layer(tmp_path: Path) -> None:
    first = make_checkpoint("llama3", tmp_path)
    second = changed(first, tmp_path / "second")
    worker, expected = start(first), start(second).weights_checksum()
    with pytest.raises(InvalidInput, match=r"start_weight_update\(\) comes first"):
        worker.finish_weight_update()
    worker.start_weight_update()
    with pytest.raises(InvalidInput, match="an update has begun already"):
        worker.start_weight_update()
    buffer = torch.empty(1 << 16)
    for name, tensor in shuffled(stored(second)):
        # the next tensor comes in the same memory
        worker.load_weights([(name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor))])
    worker.finish_weight_update()
    assert worker.weights_checksum() == expected
    worker.start_weight_update()
    assert not worker.cancel_weight_update()
    worker.start_weight_update()
    worker.load_weights(list(stored(first).items()))
    assert worker.cancel_weight_update()


def test_an_update_that_needs_all_weights_ends_only_when_all_have_come(tmp_path: Path) -> None:
    first = make_checkpoint("llama3", tmp_path)
    second = changed(first, tmp_path / "second")
    worker, tensors = start(first), stored(second)
    worker.start_weight_update(needs_all=True)
    given = {name: each for name, each in tensors.items() if ".layers.1." not in name}
    worker.load_weights(list(given.items()))
    with pytest.raises(InvalidInput, match=rf"lacks {len(tensors) - len(given)} tensors: .*layers.1."):
        worker.finish_weight_update()
    worker.load_weights([(name, each) for name, each in tensors.items() if name not in given])
    worker.finish_weight_update()
    assert worker.weights_checksum() == start(second).weights_checksum()
