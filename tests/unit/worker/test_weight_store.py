"""Where a worker's weights come from, and what it saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from native_kernels import needs_kernels
from test_format_choice import INTEGERS, STORED
from test_worker import ALONE, MOE, SHAPE

from raycore.checkpoint.sharded_state import Shard
from raycore.config import resolve
from raycore.demo import DEMO_MODEL_DIR
from raycore.errors import InvalidConfig
from raycore.weights.named import named_weights
from raycore.worker.rank import WorkerRank
from raycore.worker.setup import WorkerSetup, set_up
from raycore.worker.weight_store import describe_stored, read_weights, save_weights, shard_of


def make(path: Path, rank: WorkerRank = ALONE, **options: Any) -> WorkerSetup:
    config = resolve(str(path), num_threads=1, **options)
    return set_up(config, rank.with_experts(config.parallel, None))


def equal(one: WorkerSetup, other: WorkerSetup) -> bool:
    pairs = zip(*(named_weights(read_weights(each, each.share)) for each in (one, other)), strict=True)
    return all(name == same and torch.equal(weight, again) for (name, weight), (same, again) in pairs)


def test_saved_weights_are_read_back_unchanged(tmp_path: Path) -> None:
    original = make(DEMO_MODEL_DIR, dtype="float32")
    (path,) = save_weights(original, tmp_path / "saved", None, None)
    assert path.name == "model-rank-0-part-0.safetensors"
    assert (tmp_path / "saved" / "tokenizer.json").exists()
    seen: list[tuple[int, int]] = []
    saved = make(tmp_path / "saved", dtype="float32", load_format="sharded_state")
    read_weights(saved, saved.share, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert equal(original, saved)


@needs_kernels
def test_a_worker_says_which_layers_of_a_gguf_file_stay_integers(tmp_path: Path) -> None:
    gguf_files = pytest.importorskip("gguf_files", reason="needs the extra gguf")
    checkpoint = make_checkpoint("qwen2", tmp_path, num_key_value_heads=4)
    write, sizes = gguf_files.write_gguf, {"skip_tokenizer_init": True, "dtype": "float32"}
    file = write(checkpoint, "qwen2", tmp_path / "model.gguf", "Q4_1")
    assert describe_stored(make(file, **sizes)) == (
        "14 of 14 quantized linear layers stay integers (14 Q4_1), embed_tokens stays integers (Q4_1)"
    )
    # the last quarter of two layers' 96 inputs doesn't begin at a multiple of 16
    last = make(file, WorkerRank(0, 3, 4, 3, 4), tensor_parallel_size=4, **sizes)
    assert describe_stored(last).startswith(
        "12 of 14 quantized linear layers stay integers (12 Q4_1), 2 become float32 (2 Q4_1), embed_tokens stays"
    )
    wide = make_checkpoint("llama3", tmp_path, hidden_size=256, intermediate_size=512)
    file = write(wide, "llama3", tmp_path / "mixed.gguf", "Q4_K", kinds={"v_proj": "Q6_K", "embed": "F16"})
    mixed = make(file, **sizes)
    expected = "14 of 14 quantized linear layers stay integers (12 Q4_K, 2 Q6_K)"
    assert describe_stored(mixed) == expected
    assert describe_stored(make(file, attention_backend="torch", **sizes)) == (
        "14 quantized linear layers become float32 (12 Q4_K, 2 Q6_K)"
    )
    assert describe_stored(make(write(wide, "llama3", tmp_path / "plain.gguf", "F16"), **sizes)) == ""
    assert describe_stored(make(wide, **sizes)) == ""


def test_random_weights_of_a_worker_depend_on_the_seed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    first, same, other = (make(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert equal(first, same)
    assert not equal(first, other)


def test_a_shards_number_counts_only_the_ranks_with_different_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | MOE))
    options = {"load_format": "dummy", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    rank = WorkerRank(1, tp_rank=1, tp_size=2, local_rank=0, num_local_workers=4, pp_rank=1, pp_size=2)
    assert shard_of(make(tmp_path, rank, data_parallel_size=2, **options)) == Shard(1, 1)
    shared = make(tmp_path, rank, data_parallel_size=2, enable_expert_parallel=True, **options)
    assert shard_of(shared) == Shard(3, 1)


@pytest.mark.parametrize("stored", [STORED, INTEGERS])
def test_quantized_weights_are_not_saved(tmp_path: Path, stored: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"hidden_size": 32, "intermediate_size": 96} | stored))
    with pytest.raises(InvalidConfig, match=r"quantized weights, which save_sharded_state\(\) can't write"):
        save_weights(make(tmp_path, load_format="dummy"), tmp_path / "saved", None, None)
    assert not (tmp_path / "saved").exists()
