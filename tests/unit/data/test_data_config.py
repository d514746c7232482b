"""What `ProcessorConfig` takes, and what the engine and Ray Data get of it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from raycore.data import (
    ChatTemplateStageConfig,
    DetokenizeStageConfig,
    PrepareMultimodalStageConfig,
    ProcessorConfig,
    TokenizerStageConfig,
    build_processor,
)
from raycore.data.config import cpus_of_ranks, engine_options
from raycore.errors import InvalidConfig


def config(**fields: Any) -> ProcessorConfig:
    return ProcessorConfig(model_source="model", **fields)


RAYS_FIELDS = {
    "model_source", "batch_size", "concurrency", "accelerator_type", "runtime_env", "max_pending_requests",
    "max_concurrent_batches", "max_tasks_in_flight_per_actor", "should_continue_on_error", "engine_kwargs", "task_type",
    "log_engine_metrics", "dynamic_lora_loading_path", "placement_group_config", "chat_template_stage",
    "tokenize_stage", "detokenize_stage", "prepare_multimodal_stage",
}  # fmt: skip


def test_it_has_the_fields_of_rays_processors():
    assert set(ProcessorConfig.__struct_fields__) == RAYS_FIELDS
    assert pickle.loads(pickle.dumps(config(concurrency=(1, 2)))) == config(concurrency=(1, 2))


def test_fields_and_their_stages_are_those_of_the_installed_ray():
    llm = pytest.importorskip("ray.data.llm", reason="needs the extra data")
    assert set(llm.vLLMEngineProcessorConfig.model_fields) == RAYS_FIELDS
    stages = [ChatTemplateStageConfig, TokenizerStageConfig, DetokenizeStageConfig, PrepareMultimodalStageConfig]
    for stage in stages:
        assert set(stage.__struct_fields__) == set(getattr(llm, stage.__name__).model_fields)
    given = llm.ChatTemplateStageConfig(num_cpus=0.5, chat_template="{{ messages }}")
    chosen = config(chat_template_stage=given)
    assert chosen.chat_template == ChatTemplateStageConfig(num_cpus=0.5, chat_template="{{ messages }}")
    # each row asks for the stages
    assert chosen.chat_template is chosen.chat_template


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 isn't a positive integer"),
        ({"batch_size": "x"}, "batch_size='x'"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"concurrency": (3, 2)}, r"concurrency=\(3, 2\) isn't a positive integer, or two that ascend"),
        ({"task_type": "sing"}, "task_type='sing'"),
        ({"engine_kwargs": {"no_such": 1}}, "unknown option 'no_such'"),
        ({"engine_kwargs": {"max_num_seqs": -1}}, "max_num_seqs=-1"),
        ({"engine_kwargs": {"data_parallel_size": 2}}, "has data_parallel_size=2, but concurrency=1: omit it"),
        ({"engine_kwargs": {"model": "other"}}, "has model='other', but model_source='model': omit it"),
        ({"tokenize_stage": 3}, "tokenize_stage=3 isn't True, False, a dict or a TokenizerStageConfig"),
        ({"tokenize_stage": {"batch": 3}}, "tokenize_stage: unknown setting 'batch'; did you mean batch_size?"),
        ({"detokenize_stage": {"concurrency": (2, 1)}}, r"concurrency=\(2, 1\)"),
        ({"placement_group_config": {}}, "give 'bundle_per_worker' or 'bundles'"),
        ({"placement_group_config": {"bundles": [{"CPU": 1}] * 2}}, "aren't 1 equal ones"),
        ({"placement_group_config": {"bundle_per_worker": {"CPU": 1}, "strategy": "SPREAD"}}, "strategy='SPREAD'"),
    ],
)
def test_what_is_invalid_is_named(fields, message):
    with pytest.raises(InvalidConfig, match=message):
        config(**fields)


def test_the_engine_gets_options():
    options = engine_options(config(concurrency=3, engine_kwargs={"max_num_seqs": 8}))
    assert options == {"max_num_seqs": 8, "data_parallel_size": 3, "runner": "generate"}
    assert engine_options(config(task_type="classify"))["convert"] == "classify"
    chosen = config(
        accelerator_type="H100",
        engine_kwargs={"tensor_parallel_size": 2},
        placement_group_config={"bundles": [{"CPU": 2, "GPU": 0}] * 2, "strategy": "STRICT_PACK"},
    )
    options = engine_options(chosen)
    assert options["resources_per_worker"] == {"CPU": 2, "accelerator_type:H100": 0.001}
    assert options["placement_strategy"] == "fill"
    assert chosen.engine_kwargs == {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("fields", "cluster_cpus", "expected"),
    [
        ({"concurrency": 2}, 16, (1.0, 2.0)),
        ({"concurrency": 2}, 2, (0.5, 1.0)),
        ({"concurrency": 3}, 2, (0.33, 0.99)),
        ({"concurrency": 2}, 1, (0.01, 0.02)),
        ({"concurrency": 1, "engine_kwargs": {"tensor_parallel_size": 2}}, 2, (0.33, 0.99)),
        ({"concurrency": 2, "engine_kwargs": {"wait_for_nodes_s": 60}}, 2, (1.0, 2.0)),
        ({"concurrency": 2, "placement_group_config": {"bundle_per_worker": {"CPU": 4}}}, 2, (4, 8)),
    ],
)
def test_ranks_leave_a_cpu_to_ray_data(fields, cluster_cpus, expected):
    assert cpus_of_ranks(config(**fields), cluster_cpus) == pytest.approx(expected)


def test_ranks_leave_two_cpus_to_a_run_that_goes_on():
    assert cpus_of_ranks(config(concurrency=2), 3, num_left=2) == (0.5, 1.0)


def test_enough_rows_are_on_their_way_to_each_rank():
    assert config(concurrency=2).num_batches * 32 == 2 * 512
    assert config(concurrency=2, batch_size=1000).num_batches == 4
    assert config(concurrency=2, max_concurrent_batches=8).num_batches == 16
    assert config(engine_kwargs={"max_num_seqs": 64}).num_batches == 4
    assert config(concurrency=2, max_pending_requests=5).max_rows == 10
    assert config(max_pending_requests=-1).max_rows is None


def test_a_stage_has_actors_if_it_has_wishes():
    chosen = config(
        chat_template_stage=ChatTemplateStageConfig(chat_template="{{ messages }}"),
        tokenize_stage={"num_cpus": 0.5, "concurrency": (2, 3)},
        detokenize_stage={"enabled": False, "num_cpus": 1},
        prepare_multimodal_stage=True,
    )
    stages = (chosen.chat_template, chosen.tokenize, chosen.detokenize, chosen.prepare_multimodal)
    assert [stage.has_own_actors(chosen) for stage in stages] == [False, True, False, False]


def test_a_processor_has_rays_stages_and_takes_templates_variables():
    pytest.importorskip("pyarrow", reason="needs the extra data")
    chosen = config(tokenize_stage={"num_cpus": 0.5, "concurrency": (2, 3)}, concurrency=2)
    processor = build_processor(chosen, builder_kwargs={"chat_template_kwargs": {"enable_thinking": False}})
    assert processor.list_stage_names() == ["TokenizeStage", "EngineStage"]
    assert processor.config.chat_template.chat_template_kwargs == {"enable_thinking": False}
    arguments = processor.get_stage_by_name("TokenizeStage").map_batches_kwargs
    assert (arguments["num_cpus"], arguments["compute"].min_size, arguments["compute"].max_size) == (0.5, 2, 3)
    assert processor.get_stage_by_name("EngineStage").map_batches_kwargs["num_cpus"] == 0
    with pytest.raises(ValueError, match="no stage 'Other'"):
        processor.get_stage_by_name("Other")
    with pytest.raises(InvalidConfig, match=r"isn't a raycore\.data\.ProcessorConfig"):
        build_processor(msgspec.UNSET)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidConfig, match="builder_kwargs has 'other'"):
        build_processor(chosen, builder_kwargs={"other": 1})


def test_it_can_be_imported_without_ray_data():
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from raycore.data import ProcessorConfig, build_processor\n"
        "try: build_processor(ProcessorConfig(model_source='model'))\n"
        "except Exception as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert 'pip install "raycore[data]"' in run.stdout, run.stderr
