"""What a rank writes is what it reads again, and files that don't fit are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from configs import make_config
from expert_checkpoints import QWEN as MOE
from expert_checkpoints import make_tensors as make_moe_tensors
from test_loader import PLAIN, SPEC, TIED, equal, flat, make_tensors, write

from raycore.checkpoint.sharded_state import (
    Division,
    Shard,
    ShardPaths,
    check_saved_state,
    checked_pattern,
    copy_other_files,
    read_shard_file,
)
from raycore.checkpoint.stages import Stage, split_layers
from raycore.config import ParallelConfig
from raycore.config.rank_checks import check_num_ranks
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.models.rotation import Rotation
from raycore.models.spec import ModelSpec
from raycore.weights.fp8_weight import Fp8Weight
from raycore.weights.integer_weight import IntegerWeight
from raycore.weights.linear_formats import CONVERTED, EVERY_FP8, LinearFormats
from raycore.weights.loader import DecoderWeights, Progress, load_decoder_weights
from raycore.weights.sharded_state import load_saved_weights, save_decoder_weights
from raycore.weights.share import WeightShare

PATTERN = Division(2).pattern


def load(spec: ModelSpec, path: Path, shard: Shard, division: Division, dtype: torch.dtype) -> DecoderWeights:
    return load_decoder_weights(share(spec, shard, division, dtype), path)


def shards(division: Division) -> list[Shard]:
    return [Shard(rank, stage) for stage in range(division.num_stages) for rank in range(division.num_ranks)]


def stage_of(spec: ModelSpec, shard: Shard, division: Division) -> Stage:
    return split_layers(spec, division.num_stages, division.stage_layers or None)[shard.stage]


def share(spec: ModelSpec, shard: Shard, division: Division, dtype: torch.dtype) -> WeightShare:
    experts, tp_size = None, division.tensor_parallel_size
    if spec.moe is not None and division.expert_parallel_size > 1:
        experts = spec.moe.whole_experts(shard.rank, division.expert_parallel_size)
    return WeightShare(spec, dtype, shard.rank % tp_size, tp_size, stage_of(spec, shard, division), experts)


def load_again(
    spec: ModelSpec,
    path: Path,
    shard: Shard,
    division: Division,
    dtype: torch.dtype,
    progress: Progress | None = None,
    formats: LinearFormats = CONVERTED,
) -> DecoderWeights:
    wanted = replace(share(spec, shard, division, dtype), formats=formats)
    return load_saved_weights(wanted, ShardPaths(path, division.pattern, shard), progress)


@pytest.mark.parametrize(
    ("spec", "division"),
    [
        (SPEC, Division(1)),
        (SPEC, Division(2)),
        (TIED, Division(2)),
        (MOE, Division(2)),
        (MOE, Division(1, 3)),
        (MOE, Division(2, 4)),
        (TIED, Division(2, 1, [1, 1])),
        (MOE, Division(1, 2, [2, 1])),
    ],
    ids=["one", "biases", "tied", "experts split", "experts whole", "both", "stages", "stages with whole experts"],
)
@pytest.mark.parametrize("max_bytes", [None, 300])
def test_ranks_load_the_sharded_state_that_they_saved(
    tmp_path: Path, spec: ModelSpec, division: Division, max_bytes: int | None
) -> None:
    write(tmp_path, make_moe_tensors(spec, False) if spec is MOE else make_tensors(spec))
    saved = tmp_path / "saved"
    saved.mkdir()
    for shard in shards(division):
        weights = load(spec, tmp_path, shard, division, torch.float32)
        paths = save_decoder_weights(weights, spec, division, ShardPaths(saved, division.pattern, shard), max_bytes)
        of = f"pp-{shard.stage}-tp-{shard.rank}" if division.num_stages > 1 else f"rank-{shard.rank}"
        assert [path.name for path in paths] == [f"model-{of}-part-{i}.safetensors" for i in range(len(paths))]
        assert (len(paths) == 1) == (max_bytes is None)
    check_saved_state(saved, division.pattern, spec, division)
    for shard in shards(division):
        seen: list[tuple[int, int]] = []
        progress = lambda done, total, seen=seen: seen.append((done, total))  # noqa: E731
        expected = load(spec, tmp_path, shard, division, torch.bfloat16)
        found = load_again(spec, saved, shard, division, torch.bfloat16, progress=progress)
        assert found.vocab_start == expected.vocab_start
        assert (found.lm_head_VD is found.embed_VD) == (expected.lm_head_VD is expected.embed_VD)
        assert all(a is b is None or equal(a, b) for a, b in zip(flat(found), flat(expected), strict=True))
        assert seen[-1][0] == seen[-1][1] == len(seen)
    assert not [path for path in saved.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("spec", [PLAIN, TIED], ids=["plain", "tied"])
def test_a_last_stage_whose_head_reads_the_embedding_loads_that_of_the_first(tmp_path: Path, spec: ModelSpec) -> None:
    write(tmp_path, make_tensors(spec))
    division = Division(2, 1, [1, 1])
    for shard in shards(division):
        weights = load(spec, tmp_path, shard, division, torch.float32)
        save_decoder_weights(weights, spec, division, ShardPaths(tmp_path, division.pattern, shard), None)
    for shard in shards(division):
        wanted = replace(share(spec, shard, division, torch.bfloat16), embeds=shard.stage == 1)
        expected = load_decoder_weights(wanted, tmp_path)
        found = load_saved_weights(wanted, ShardPaths(tmp_path, division.pattern, shard))
        assert found.embed_VD is not None
        assert (found.lm_head_VD is found.embed_VD) == (expected.lm_head_VD is expected.embed_VD)
        assert all(a is b is None or equal(a, b) for a, b in zip(flat(found), flat(expected), strict=True))


def test_saved_experts_are_those_of_a_number_of_ranks(tmp_path: Path) -> None:
    write(tmp_path, make_moe_tensors(MOE, False))
    saved, config = tmp_path / "saved", make_config(MOE)
    saved.mkdir()
    model = msgspec.structs.replace(config.model, model=str(saved), load_format="sharded_state")
    parallel = ParallelConfig(1, 2, enable_expert_parallel=True)
    config = msgspec.structs.replace(config, model=model, parallel=parallel)
    for shard in shards(config.division):
        weights = load(MOE, tmp_path, shard, config.division, torch.float32)
        save_decoder_weights(weights, MOE, config.division, ShardPaths(saved, config.division.pattern, shard), None)
    check_num_ranks(config)
    with pytest.raises(InvalidConfig, match=r"were saved with .*, and this engine has"):
        check_num_ranks(config.with_num_ranks(3))


def test_a_sharded_state_may_be_rounded_to_fp8_while_it_is_read(tmp_path: Path) -> None:
    write(tmp_path, make_tensors(PLAIN))
    division = Division(1)
    weights = load(PLAIN, tmp_path, Shard(0), division, torch.float32)
    save_decoder_weights(weights, PLAIN, division, ShardPaths(tmp_path, PATTERN, Shard(0)), None)
    expected = (
        load_decoder_weights(WeightShare(PLAIN, torch.float32, formats=EVERY_FP8), tmp_path).layers[0].mixer.qkv_OD
    )
    found = load_again(PLAIN, tmp_path, Shard(0), division, torch.float32, formats=EVERY_FP8).layers[0].mixer.qkv_OD
    assert isinstance(found, Fp8Weight)
    assert isinstance(expected, Fp8Weight)
    assert torch.equal(found.values_OI.float(), expected.values_OI.float())
    assert torch.equal(found.scales_O, expected.scales_O)


def test_saved_experts_may_be_rounded_to_integers_while_they_are_read(tmp_path: Path) -> None:
    write(tmp_path, make_moe_tensors(MOE, False))
    division, formats = Division(1), LinearFormats(frozenset(), "integers", False)
    weights = load(MOE, tmp_path, Shard(0), division, torch.float32)
    save_decoder_weights(weights, MOE, division, ShardPaths(tmp_path, PATTERN, Shard(0)), None)
    read = load_decoder_weights(WeightShare(MOE, torch.float32, formats=formats), tmp_path)
    again = load_again(MOE, tmp_path, Shard(0), division, torch.float32, formats=formats)
    expected, found = (
        [each for each in vars(weights.layers[0].feed_forward).values() if isinstance(each, IntegerWeight)]
        for weights in (read, again)
    )
    assert [each.words_OW.dim() for each in found] == [3, 3]
    assert all(torch.equal(a.words_OW, b.words_OW) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a.scales_OG, b.scales_OG) for a, b in zip(found, expected, strict=True))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The state of `PLAIN`, divided over two workers."""
    write(tmp_path, make_tensors(PLAIN))
    directory = tmp_path / "saved"
    directory.mkdir()
    for rank in range(2):
        weights = load(PLAIN, tmp_path, Shard(rank), Division(2), torch.float32)
        save_decoder_weights(weights, PLAIN, Division(2), ShardPaths(directory, PATTERN, Shard(rank)), None)
    return directory


def test_a_sharded_state_of_another_division_is_refused_with_both_divisions(saved: Path) -> None:
    match = r"saved with tensor_parallel_size=2, and this engine has tensor_parallel_size=1"
    with pytest.raises(InvalidConfig, match=match):
        check_saved_state(saved, PATTERN, PLAIN, Division(1))
    with pytest.raises(InvalidConfig, match="whole experts on 2 workers"):
        check_saved_state(saved, PATTERN, PLAIN, Division(1, 2))
    with pytest.raises(InvalidConfig, match="tensor_parallel_size=2, pipeline_layers=1,1: use the same"):
        check_saved_state(saved, PATTERN, PLAIN, Division(2, 1, [1, 1]))


def test_a_sharded_state_of_another_model_is_refused_with_both_models(saved: Path) -> None:
    other = msgspec.structs.replace(PLAIN, architecture="Qwen3ForCausalLM", num_layers=3)
    match = "architecture='LlamaForCausalLM' instead of 'Qwen3ForCausalLM', num_layers=2 instead of 3"
    with pytest.raises(InvalidCheckpoint, match=match):
        check_saved_state(saved, PATTERN, other, Division(2))
    rotations: list[Rotation | None] = [Rotation(1e6)] * PLAIN.num_layers
    check_saved_state(saved, PATTERN, msgspec.structs.replace(PLAIN, rotations=rotations), Division(2))


def test_a_sharded_state_whose_layers_have_other_parts_is_refused(saved: Path) -> None:
    other = msgspec.structs.replace(PLAIN, is_gated=False, parts_alone=["mixer", "feed_forward"])
    with pytest.raises(
        InvalidCheckpoint, match=r"is_gated=True instead of False, parts_alone=\[\] instead of \['mixer'"
    ):
        check_saved_state(saved, PATTERN, other, Division(2))


def test_the_biases_and_head_of_a_sharded_state_are_read_from_its_files(saved: Path) -> None:
    other = msgspec.structs.replace(PLAIN, qkv_bias=True, tie_word_embeddings=True)
    assert check_saved_state(saved, PATTERN, other, Division(2)) == PLAIN


def test_a_damaged_file_of_another_worker_is_found(saved: Path) -> None:
    file = saved / "model-rank-1-part-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InvalidCheckpoint, match=r"model-rank-1-part-0.safetensors can't be read"):
        check_saved_state(saved, PATTERN, PLAIN, Division(2))


def test_missing_and_foreign_files_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"other-0-0.safetensors doesn't exist; found model-rank-0-part-0"):
        check_saved_state(saved, "other-{rank}-{part}.safetensors", PLAIN, Division(2))
    with pytest.raises(InvalidCheckpoint, match="raycore hasn't written"):
        read_shard_file(tmp_path / "model.safetensors")
    first, second = (saved / f"model-rank-{rank}-part-0.safetensors" for rank in range(2))
    first.rename(second)
    with pytest.raises(InvalidCheckpoint, match="is the file of Shard\\(rank=0, stage=0\\), not of Shard\\(rank=1"):
        load_again(PLAIN, saved, Shard(1), Division(2), torch.float32)
    second.write_bytes(second.read_bytes()[:100])
    with pytest.raises(InvalidCheckpoint, match="can't be read"):
        read_shard_file(second)


def test_a_state_with_a_missing_part_is_refused(tmp_path: Path) -> None:
    write(tmp_path, make_tensors(PLAIN))
    weights = load(PLAIN, tmp_path, Shard(0), Division(1), torch.float32)
    paths = save_decoder_weights(weights, PLAIN, Division(1), ShardPaths(tmp_path, PATTERN, Shard(0)), 500)
    paths[1].unlink()
    with pytest.raises(InvalidCheckpoint, match=r"part-1.safetensors"):
        load_again(PLAIN, tmp_path, Shard(0), Division(1), torch.float32)


@pytest.mark.parametrize(
    ("pattern", "division", "match"),
    [
        ("model-{rank}.safetensors", Division(2), "needs {part}"),
        ("model-{part}.safetensors", Division(2), "2 workers write files"),
        ("model-{rank}-{part}.safetensors", Division(2, 1, [3, 4]), "needs {pp_rank}, because 2 stages write files"),
        ("{rank}/{part}.safetensors", Division(2), "isn't the name of a file"),
        ("model-{rank}-{part}.bin", Division(2), "isn't the name of a file"),
        ("{rank}-{part}-{dp}.safetensors", Division(1), "no others"),
        ("{rank", Division(1), "isn't a pattern"),
        (5, Division(1), "pattern=5"),
    ],
)
def test_patterns_that_name_no_file_or_one_for_several_are_refused(
    pattern: Any, division: Division, match: str
) -> None:
    with pytest.raises(InvalidConfig, match=match):
        checked_pattern(pattern, division)


def test_the_default_file_pattern_is_vllms() -> None:
    assert checked_pattern(None, Division(8)) == "model-rank-{rank}-part-{part}.safetensors"
    assert checked_pattern(None, Division(8, 1, [1, 1])) == "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"
    assert checked_pattern("m-{tp_rank}-{part}.safetensors", Division(2))


def test_saving_a_state_copies_all_files_but_the_weights(tmp_path: Path) -> None:
    model, tokenizer, out = (tmp_path / name for name in ("model", "tokenizer", "out"))
    for directory in (model, tokenizer, out):
        directory.mkdir()
    names = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "a.bin")
    for name in (*names, "tokenizer.json"):
        (model / name).write_text("the model's")
    (model / "folder").mkdir()
    copy_other_files(model, model, out)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "generation_config.json", "tokenizer.json"]
    (tokenizer / "tokenizer.json").write_text("another")
    (tokenizer / "config.json").write_text("another")
    copy_other_files(model, tokenizer, out)
    assert [(out / name).read_text() for name in ("config.json", "tokenizer.json")] == ["the model's", "another"]
    copy_other_files(model, model, model)  # where the files are already
    assert (model / "config.json").read_text() == "the model's"
