"""Engines that start from the weights that another engine's workers have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import make_checkpoint
from number_formats import DTYPE

from raycore import LLM, InvalidConfig, SamplingParams
from raycore.demo import demo_model_path
from raycore.errors import InvalidCheckpoint

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [20]]
OPTIONS: dict[str, Any] = {"num_threads": 1, "max_model_len": 200, "dtype": DTYPE, "standby_delay_s": None}


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_a_sharded_state_is_loaded_by_engines_of_the_same_shape(ray_cluster, tmp_path: Path):
    shape = {"tensor_parallel_size": 2, "data_parallel_size": 2, **OPTIONS}
    with LLM(demo_model_path(), **shape) as llm:
        expected = tokens(llm)
        with pytest.raises(InvalidConfig, match=r"pattern='model-\{part\}.safetensors' needs \{rank\}"):
            llm.save_sharded_state(tmp_path, pattern="model-{part}.safetensors")
        llm.save_sharded_state(tmp_path / "whole")
        llm.save_sharded_state(str(tmp_path / "parts"), "m-{rank}-{part}.safetensors", 100_000)
        assert tokens(llm) == expected
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert {path.name for path in whole.glob("*.safetensors")} == {
        "model-rank-0-part-0.safetensors",
        "model-rank-1-part-0.safetensors",
    }
    assert len(list(parts.glob("m-1-*.safetensors"))) > 2
    with LLM(str(whole), load_format="sharded_state", **shape | {"data_parallel_size": 1}) as llm:
        assert tokens(llm) == expected
        # what was loaded like this may be written again, as vLLM's programs do it
        llm.collective_rpc("save_sharded_state", kwargs={"path": str(tmp_path / "again")})
    first = "model-rank-0-part-0.safetensors"
    assert (tmp_path / "again" / first).read_bytes() == (whole / first).read_bytes()
    pattern = {"model_loader_extra_config": {"pattern": "m-{rank}-{part}.safetensors"}, "load_format": "sharded_state"}
    with LLM(str(parts), **pattern, **shape | {"data_parallel_size": 1}) as llm:
        assert tokens(llm) == expected
    with pytest.raises(InvalidConfig, match=r"tensor_parallel_size=2, and this engine has tensor_parallel_size=1"):
        LLM(str(whole), load_format="sharded_state", **OPTIONS)
    with pytest.raises(InvalidCheckpoint, match="load_format='sharded_state'"):
        LLM(str(whole), **OPTIONS)


def test_each_pipeline_stage_saves_its_own_layers_of_a_sharded_state(ray_cluster, tmp_path: Path):
    shape = {"pipeline_parallel_size": 2, **OPTIONS}
    with LLM(demo_model_path(), **shape) as llm:
        expected = tokens(llm)
        llm.save_sharded_state(tmp_path)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {
        "model-pp-0-tp-0-part-0.safetensors",
        "model-pp-1-tp-0-part-0.safetensors",
    }
    with LLM(str(tmp_path), load_format="sharded_state", **shape) as llm:
        assert tokens(llm) == expected
    pattern = {"pattern": "m-{rank}-{part}.safetensors"}
    with pytest.raises(InvalidConfig, match=r"needs \{pp_rank\}"):
        LLM(str(tmp_path), load_format="sharded_state", model_loader_extra_config=pattern, **shape)


def test_saved_weights_of_a_multimodal_checkpoint_are_loaded_by_raycores_names(ray_cluster, tmp_path: Path):
    """Whatever the checkpoint calls them, and whatever else it has."""
    checkpoint = make_checkpoint("gemma3_multimodal", tmp_path)
    options = {**OPTIONS, "dtype": "float32", "tensor_parallel_size": 2}
    with LLM(str(checkpoint), **options) as llm:
        expected = tokens(llm)
        llm.save_sharded_state(tmp_path / "saved")
    with LLM(str(tmp_path / "saved"), load_format="sharded_state", **options) as llm:
        assert tokens(llm) == expected


def test_ranks_that_share_experts_save_all_experts_of_a_sharded_state(ray_cluster, tmp_path: Path):
    checkpoint = make_checkpoint("qwen3_moe", tmp_path)
    shape = {"data_parallel_size": 2, "enable_expert_parallel": True, **OPTIONS, "dtype": "float32"}
    with LLM(str(checkpoint), **shape) as llm:
        expected = tokens(llm)
        llm.save_sharded_state(tmp_path / "saved")
    with LLM(str(tmp_path / "saved"), load_format="sharded_state", **shape) as llm:
        assert tokens(llm) == expected
    with pytest.raises(InvalidConfig, match="whole experts on 2 workers, and this engine has tensor_parallel_size=1"):
        LLM(str(tmp_path / "saved"), load_format="sharded_state", **OPTIONS)
