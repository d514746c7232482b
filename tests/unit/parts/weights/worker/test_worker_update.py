"""Weights are replaced while a worker stays, and are then those of a worker that has read them from files."""

from __future__ import annotations

import gc
import json
import random
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from drafting_checkpoints import head_config, random_head, write_checkpoint
from families import FAMILIES, make_checkpoint
from fp8_blocks import write_blocks
from native_kernels import needs_kernels
from own_memory import resident_bytes
from safetensors.torch import load_file, save_file
from torch import Tensor
from write_quantized import DIRECTORY

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.errors import InvalidCheckpoint, InvalidConfig, InvalidInput, WorkerFailed
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.node import resources as host
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.weights.config import WeightTransferConfig
from raycore.parts.weights.transfer.ways import make_way
from raycore.sampling_params import SamplingParams
from raycore.weights.checkpoint_reader import CheckpointReader
from raycore.worker.rank import RankIdentity, WorkerRank, load_worker_class
from raycore.worker.setup import set_up
from raycore.worker.worker import Worker
from raycore.worker.worker_model import WorkerModel

ALONE = WorkerRank(dp_rank=0, tp_rank=0, tp_size=1, local_rank=0, num_local_workers=1)
RUN_FAMILIES = [
    *("llama3", "gemma3", "gpt_oss", "deepseek_v3", "glm_moe_dsa", "qwen3"),
    *("qwen3_next", "kimi_linear", "granitemoehybrid", "lfm2", "starcoder2", "stablelm", "apertus", "olmo"),
    *("falcon_h1", "minimax", "olmo_hybrid", "jamba"),
]
OPTIONS: list[dict[str, Any]] = [{}, {"attention_backend": "torch"}, {"batch_invariant": True}, {"enable_lora": True}]
SOME_FAMILIES = ["llama3", "qwen3", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "gemma3_multimodal"]
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
@pytest.mark.parametrize(
    "family", ["llama3", "qwen3", "mixtral", "gemma3_multimodal", "deepseek_v3", "qwen3_next", "kimi_linear"]
)
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
    worker._make_parts()
    core = worker._core
    core.take(set_up(config, worker.rank))
    core.groups.ranks = TensorParallel(rank.tp_rank, rank.tp_size)
    core.model = WorkerModel(core.setup, core.groups)
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


@pytest.mark.parametrize("given", ["all", "the embedding"])
@pytest.mark.parametrize("family", ["llama3", "qwen3"])  # with a tied head, and without
def test_a_head_of_the_last_stage_reads_the_new_embedding(family: str, given: str, tmp_path: Path) -> None:
    first = make_checkpoint(family, tmp_path)
    model = json.loads((first / "config.json").read_text())
    config = head_config(model["hidden_size"], model["vocab_size"], eagle_aux_hidden_state_layer_ids=[0, 1])
    head = write_checkpoint(tmp_path / "head", config, random_head(config))
    second = changed(first, tmp_path / "second")
    rank = msgspec.structs.replace(ALONE, pp_rank=1, pp_size=2)
    options: dict[str, Any] = {"pipeline_parallel_size": 2, "async_scheduling": True}
    options["speculative_config"] = {"model": str(head), "num_speculative_tokens": 2}
    worker, expected = (started_alone(path, rank, **options) for path in (first, second))
    tensors = stored(second)
    if given == "the embedding":
        tensors = {name: each for name, each in tensors.items() if "embed_tokens" in name}
    worker.start_weight_update()
    worker.load_weights(shuffled(tensors))
    worker.finish_weight_update()
    some = torch.arange(5)
    embedded, new = (each._core.model.drafting.network._embed_in_target(some) for each in (worker, expected))
    assert torch.equal(embedded, new)
    assert given != "all" or worker.weights_checksum() == expected.weights_checksum()


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


def test_scales_that_are_powers_of_two_come_from_a_directory(tmp_path: Path) -> None:
    first, _ = write_blocks(make_checkpoint("llama3", tmp_path))
    tensors = stored(first)
    scales = {name: each.to(torch.float8_e8m0fnu) for name, each in tensors.items() if name.endswith("_scale_inv")}
    save_file(tensors | scales, first / "model.safetensors", {"format": "pt"})
    second = changed(first, tmp_path / "second")
    worker, fresh = start(first), start(second)
    assert worker.weights_checksum() != fresh.weights_checksum()
    way = make_way(WeightTransferConfig("disk"), 0, torch.device("cpu"))
    way.receive({"path": str(second)}, worker.load_weights, lambda described: None)
    assert worker.weights_checksum() == fresh.weights_checksum()


def gguf_pair(tmp_path: Path, kind: str, *, is_tied: bool = True, **kinds: str) -> tuple[Path, Path, Path]:
    """Return a GGUF file, one of the same model and types with other numbers, and the latter's checkpoint."""
    gguf_files = pytest.importorskip("gguf_files", reason="needs the extra gguf")
    family, sizes = "llama3", {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 207}
    first = make_checkpoint(family, tmp_path, **sizes, tie_word_embeddings=is_tied)
    second = changed(first, tmp_path / "second")
    files = [
        gguf_files.write_gguf(each, family, tmp_path / f"{name}.gguf", kind, kinds=kinds)
        for name, each in (("one", first), ("two", second))
    ]
    return files[0], files[1], second


def as_blocks(checkpoint: Path, kind: str, **kinds: str) -> dict[str, Tensor]:
    """Return a checkpoint's tensors as an update brings them to an engine that keeps these types."""
    import gguf

    found = stored(checkpoint)
    head = "lm_head.weight" if "lm_head.weight" in found else "model.embed_tokens.weight"
    for name, tensor in found.items():
        if tensor.dim() < 2:
            continue
        own = gguf.GGMLQuantizationType[next((each for part, each in kinds.items() if part in name), kind)]
        blocks = gguf.quants.quantize(tensor.float().numpy(), own)
        is_kept = "_proj.weight" in name or name == head  # else converted while it is read
        found[name] = torch.from_numpy(blocks if is_kept else gguf.quants.dequantize(blocks, own))
    return found


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    ("kind", "kinds", "is_tied"),
    [
        ("Q8_0", {}, True),
        ("Q4_0", {}, False),
        ("Q4_1", {"v_proj": "Q8_0", "embed_tokens": "Q8_0"}, True),
        ("Q5_0", {"down_proj": "Q5_1", "lm_head": "Q4_1"}, False),
    ],
)
def test_an_engine_of_a_gguf_file_takes_blocks_of_its_types(
    kind, kinds, is_tied, backend, tp_rank, tmp_path: Path
) -> None:
    first, second, checkpoint = gguf_pair(tmp_path, kind, is_tied=is_tied, **kinds)
    rank = msgspec.structs.replace(ALONE, tp_rank=tp_rank, tp_size=2)
    worker, fresh = (
        started_alone(path, rank, tensor_parallel_size=2, attention_backend=backend) for path in (first, second)
    )
    assert worker.weights_checksum() != fresh.weights_checksum()
    worker.load_weights(shuffled(as_blocks(checkpoint, kind, **kinds)))
    assert worker.weights_checksum() == fresh.weights_checksum()


def test_numbers_replace_converted_weights_of_a_gguf_file(tmp_path: Path) -> None:
    first, second, checkpoint = gguf_pair(tmp_path, "F32")
    worker, fresh = start(first), start(second)
    worker.load_weights(shuffled(stored(checkpoint)))
    assert worker.weights_checksum() == fresh.weights_checksum()
    (tmp_path / "more").mkdir()
    first, second, checkpoint = gguf_pair(tmp_path / "more", "Q8_0")
    worker, plain = start(first, attention_backend="torch"), start(checkpoint, attention_backend="torch")
    worker.load_weights(shuffled(stored(checkpoint)))
    assert worker.weights_checksum() == plain.weights_checksum()


@needs_kernels
def test_an_engine_of_a_gguf_file_refuses_what_it_cannot_keep(tmp_path: Path) -> None:
    first, _, checkpoint = gguf_pair(tmp_path, "Q4_1")
    worker = start(first)
    before, name = worker.weights_checksum(), "model.layers.1.self_attn.q_proj.weight"
    blocks = as_blocks(checkpoint, "Q4_1")
    others = [(each, tensor) for each, tensor in blocks.items() if each != name]
    number, bfloat16 = stored(checkpoint)[name].float(), stored(checkpoint)["model.embed_tokens.weight"].bfloat16()
    kept = (
        r"q_proj.weight' has type torch.float32, and this engine keeps the integers of its GGUF file: send blocks of "
    )
    with pytest.raises(InvalidInput, match=kept + r"Q4_1 or Q4_K, uint8\[\(256, 160\), \(256, 144\)\]"):
        worker.load_weights([*others, (name, number)])
    head, expected = "model.embed_tokens.weight", r"embed_tokens.weight' has type torch.bfloat16, and this engine keeps"
    with pytest.raises(InvalidInput, match=expected):
        worker.load_weights([(each, tensor) for each, tensor in blocks.items() if each != head] + [(head, bfloat16)])
    with pytest.raises(InvalidInput, match=r"has type torch.uint8 and shape \(256, 256\): expected blocks of Q4_1"):
        worker.load_weights([*others, (name, number.to(torch.uint8))])
    with pytest.raises(InvalidInput, match=r"has type torch.float32 and shape \(256, 160\): expected blocks of Q4_1"):
        worker.load_weights([*others, (name, torch.zeros(256, 160))])
    with pytest.raises(
        InvalidInput, match=r"has shape \(256, 272\), but the model's has \(256, 144\) or \(256, 160\) or"
    ):
        worker.load_weights([*others, (name, torch.zeros(256, 272, dtype=torch.uint8))])
    norm = "model.layers.1.input_layernorm.weight"
    with pytest.raises(InvalidInput, match=r"input_layernorm.weight' has type torch.int64: expected float32"):
        worker.load_weights([*others, (norm, torch.zeros(256, dtype=torch.int64))])
    assert worker.weights_checksum() == before


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16"])
def test_files_of_the_same_types_are_read_into_a_running_worker(kind: str, is_tied: bool, tmp_path: Path) -> None:
    first, second, _ = gguf_pair(tmp_path, kind, is_tied=is_tied, v_proj="Q6_K")
    worker, fresh = start(first), start(second)
    assert worker.weights_checksum() != fresh.weights_checksum()
    worker.reload_from(str(second))
    assert worker.weights_checksum() == fresh.weights_checksum()


@pytest.mark.parametrize("is_tied", [True, False])
def test_dropped_weights_of_a_gguf_file_are_read_again_or_come_in_an_update(is_tied: bool, tmp_path: Path) -> None:
    first, second, checkpoint = gguf_pair(tmp_path, "Q8_0", is_tied=is_tied)
    worker = start(first)
    before, blocks = worker.weights_checksum(), as_blocks(checkpoint, "Q8_0")
    worker.sleep(2)
    worker.wake_up(["weights"])
    assert worker.weights_checksum() == before
    worker.sleep(2)
    worker.wake_up(["weights"], False)
    worker.start_weight_update()
    worker.load_weights(shuffled(blocks))
    worker.finish_weight_update()
    assert worker.weights_checksum() == start(second).weights_checksum()


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_some_tensors_of_a_layer_change_and_the_others_stay(
    family: str, backend: str, dtype: str, tmp_path: Path
) -> None:
    """Those that adapters change, when they are merged, or a single expert."""
    first = make_checkpoint(family, tmp_path)
    second = changed(first, tmp_path / "second")
    both = changed(first, tmp_path / "both")
    some = ("q_proj.weight", "v_proj.weight", "q_a_proj.weight", "experts.1.w2.weight", "gate_proj.weight", "A_log")
    for file in both.glob("model*.safetensors"):
        old, new = load_file(first / file.name), load_file(second / file.name)
        save_file({name: new[name] if name.endswith(some) else old[name] for name in old}, file, {"format": "pt"})
    options = {"attention_backend": backend, "dtype": dtype}
    worker, expected = start(first, **options), start(both, **options).weights_checksum()
    given = {name: each for name, each in stored(second).items() if name.endswith(some)}
    assert given
    assert worker.weights_checksum() != expected
    worker.load_weights(shuffled(given))
    assert worker.weights_checksum() == expected


@needs_kernels
def test_some_tensors_of_a_layer_in_8_bits_change(tmp_path: Path) -> None:
    first = make_checkpoint("llama3", tmp_path)
    second = changed(first, tmp_path / "second")
    worker, fresh = start(first, quantization="int8"), start(second, quantization="int8")
    tensors = stored(second)
    for part in (0, 1):
        worker.load_weights(list(tensors.items())[part::2])
        worker.weights_checksum()  # applies what has come
    assert worker.weights_checksum() == fresh.weights_checksum()


def test_numbers_of_float32_replace_some_that_fit_into_16_bits(tmp_path: Path) -> None:
    """Layers may store weights in 16 bits, in which the new ones can't be stored."""
    first = make_checkpoint("llama3", tmp_path)
    for file in first.glob("model*.safetensors"):
        save_file({name: each.bfloat16() for name, each in load_file(file).items()}, file, {"format": "pt"})
    whole = tmp_path / "whole"
    shutil.copytree(first, whole)
    tensors = {name: each.float() for name, each in stored(first).items()}
    given = {name: each * 1.01 for name, each in tensors.items() if name.endswith("q_proj.weight")}
    save_file(tensors | given, whole / "model.safetensors", {"format": "pt"})
    worker, expected = start(first), start(whole).weights_checksum()
    worker.load_weights(list(given.items()))
    assert worker.weights_checksum() == expected


def test_weights_are_replaced_by_those_of_another_directory(tmp_path: Path) -> None:
    for family in ("qwen3", "mixtral", "gemma3_multimodal"):
        first = make_checkpoint(family, tmp_path)
        second = changed(first, tmp_path / f"{family} 2")
        engine, expected = Engine(first), Engine(second)
        engine.call("reload_from", str(second))
        assert engine.call("weights_checksum") == expected.call("weights_checksum")
        assert engine.logprobs() == expected.logprobs()
        assert not engine.call("lacks_weights")
        broken = changed(first, tmp_path / f"{family} 3", seed=2)
        last = sorted(broken.glob("model*.safetensors"))[-1]
        save_file({name: torch.zeros(1) for name in load_file(last)}, last, {"format": "pt"})
        with pytest.raises((InvalidCheckpoint, WorkerFailed), match=r"has shape \(1,\)"):
            engine.call("reload_from", str(broken))
        assert engine.call("weights_checksum") == expected.call("weights_checksum"), "shapes are checked first"


def test_weights_that_were_dropped_need_a_whole_update(tmp_path: Path) -> None:
    for family in ("llama3", "qwen3_moe"):
        first = make_checkpoint(family, tmp_path)
        second = changed(first, tmp_path / f"{family} 2")
        worker, expected = start(first), start(second).weights_checksum()
        worker.sleep(2)
        worker.wake_up(["weights"], False)
        assert worker.lacks_weights()
        tensors = shuffled(stored(second))
        worker.start_weight_update()
        worker.load_weights(tensors[3:])
        with pytest.raises(InvalidInput, match=r"lacks 3 tensors: model"):
            worker.finish_weight_update()
        assert worker.lacks_weights()
        worker.load_weights(tensors[:3])
        worker.finish_weight_update()
        assert not worker.lacks_weights()
        assert worker.weights_checksum() == expected
        for reads_weights in (False, True):
            worker.sleep(2)
            worker.wake_up(["weights"], reads_weights)
            assert worker.lacks_weights() != reads_weights
        assert worker.weights_checksum() != expected, "these are the checkpoint's"


def test_an_update_needs_memory_for_few_layers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8}
    path = make_checkpoint("llama3", tmp_path, **sizes)
    worker, num_bytes = start(path), sum(file.stat().st_size for file in path.glob("*.safetensors"))
    host.keep_freed_memory()
    before = most = resident_bytes()
    worker.start_weight_update()
    for name, tensor in stored_one_by_one(path):
        worker.load_weights([(name, tensor)])
        most = max(most, resident_bytes())
    worker.finish_weight_update()
    assert most - before < num_bytes / 2, "the checkpoint has 12 layers"


def stored_one_by_one(path: Path) -> Iterator[tuple[str, Tensor]]:
    with CheckpointReader(path) as reader:
        for name in reader.names:
            shape = reader.shape(name)
            yield name, reader.read(name, shape, torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_of_an_update_stays_but_the_numbers(dtype: str, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path)
    worker, tensors = start(path, dtype=dtype), stored(path)
    alive = {name: weakref.ref(each.untyped_storage()) for name, each in tensors.items()}
    gc.disable()  # else a tensor may stay until the next collection, and with it memory that is shared
    try:
        worker.start_weight_update()
        worker.load_weights(list(tensors.items()))
        tensors.clear()
        assert not [name for name, each in alive.items() if each() is not None]
    finally:
        gc.enable()
    worker.finish_weight_update()


class Extension:
    """What vLLM's users mix into workers."""

    def update_weight(self: Any, name: str, factor: float) -> tuple[int, int, str, str]:
        tensor = self.held[name].to(self.device, self.model_config.dtype) * factor
        self.model_runner.model.load_weights(weights=[(name, tensor)])
        return self.rank + 1, self.local_rank, str(self.model_config.dtype), self.device.type

    def hold(self: Any, path: str) -> None:
        self.held = stored(Path(path))

    def sum_of_ranks(self: Any) -> tuple[int, int, float]:
        total = torch.tensor([self.rank + 1.0])
        torch.distributed.all_reduce(total)
        return torch.distributed.get_rank(), torch.distributed.get_world_size(), total.item()


class Conflicting:
    def load_weights(self) -> None: ...


def test_methods_of_an_extension_load_weights(tmp_path: Path) -> None:
    path = make_checkpoint("llama3", tmp_path)
    engine = Engine(path, dtype="float32", worker_extension_cls=Extension)
    before = engine.logprobs()
    engine.call("hold", str(path))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert engine.call("update_weight", name, 2.0) == (1, 0, "torch.float32", "cpu")
    assert engine.logprobs() != before
    engine.call("update_weight", name, 1.0)
    assert engine.logprobs() == before
    assert engine.call("sum_of_ranks") == (0, 1, 1.0)
    engine._executor.shutdown()
    assert not torch.distributed.is_initialized()
    Engine(path, dtype="float32")
    assert not torch.distributed.is_initialized(), "only extensions need it"
    with pytest.raises(InvalidConfig, match="Conflicting' has load_weights, which workers have themselves"):
        load_worker_class(resolve(str(path), worker_extension_cls=Conflicting).parallel)


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
