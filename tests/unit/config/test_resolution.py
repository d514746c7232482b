"""What `resolve()` decides from the options and the checkpoint, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
from configs import SPEC

from raycore.config import EngineConfig, ExecutorConfig, RecoveryConfig, resolve
from raycore.config.checks import default_num_seqs
from raycore.demo import DEMO_MODEL_DIR
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.models.mixers.delta import DeltaSpec

MODEL = str(DEMO_MODEL_DIR)
"""1024 positions, 4 query and 4 key-value heads."""


class MyWorker:
    pass


def test_options_left_out_come_from_the_checkpoint() -> None:
    config = resolve(MODEL)
    assert config.model.model == config.model.tokenizer == MODEL
    assert config.model.spec.architecture == "LlamaForCausalLM"
    assert config.model.max_model_len == config.scheduler.max_model_len == 1024
    assert config.model.dtype == "auto"
    assert (config.parallel.tensor_parallel_size, config.parallel.data_parallel_size) == (1, 1)
    assert config.parallel.worker_cls is None


def test_resolve_puts_each_option_into_its_part_of_the_config() -> None:
    config = resolve(
        MODEL,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        block_size=32,
        num_gpu_blocks_override=10,
        kv_cache_memory_bytes=1 << 20,
        enable_prefix_caching=False,
        tensor_parallel_size=2,
        data_parallel_size=3,
        executor_transport="actor_call",
        scheduling_policy="priority",
        long_prefill_token_threshold=64,
        num_threads=1,
        seed=7,
        batch_invariant=True,
        prepare_structured_outputs=True,
        engine_name="chat-2.b",
        wait_for_nodes_s=90,
    )
    assert config.engine_name == "chat-2.b"
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (4, 128)
    assert (config.scheduler.max_model_len, config.model.max_model_len) == (512, 512)
    assert (config.scheduler.policy, config.scheduler.long_prefill_token_threshold) == ("priority", 64)
    assert (config.cache.block_size, config.cache.enable_prefix_caching) == (32, False)
    assert (config.cache.num_gpu_blocks_override, config.cache.kv_cache_memory_bytes) == (10, 1 << 20)
    assert (config.parallel.world_size, config.parallel.data_parallel_size) == (2, 3)
    assert config.parallel.wait_for_nodes_s == 90.0
    assert (config.executor.transport, config.executor.num_threads) == ("actor_call", 1)
    assert (config.model.seed, config.model.batch_invariant) == (7, True)
    assert config.model.prepare_structured_outputs is True


@pytest.mark.parametrize(
    ("given", "decided"),
    [
        ({}, (256, 2048)),
        ({"max_num_batched_tokens": 48}, (48, 48)),
        ({"max_num_batched_tokens": 512}, (256, 512)),
        ({"max_num_seqs": 8}, (8, 2048)),
        ({"max_num_seqs": 4096}, (4096, 4096)),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 8}, (8, 8)),
    ],
)
def test_default_batch_limits_adapt_to_the_limits_that_were_chosen(
    given: dict[str, Any], decided: tuple[int, int]
) -> None:
    scheduler = resolve(MODEL, **given).scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == decided


def test_none_means_the_default_for_options_without_a_none_value() -> None:
    none = {"block_size": None, "max_num_seqs": None, "dtype": None, "device": None, "seed": None, "tokenizer": None}
    assert resolve(MODEL, **none) == resolve(MODEL)
    assert resolve(MODEL, standby_delay_s=None).recovery.standby_delay_s is None


def test_every_limit_of_the_recovery_can_be_chosen() -> None:
    limits = {
        "max_request_replays": 3,
        "step_timeout_s": 1.0,
        "drain_timeout_s": 2.0,
        "max_rank_restarts": 4,
        "restart_window_s": 5.0,
        "restart_backoff_s": 6.0,
        "crash_loop_s": 7.0,
        "max_restart_backoff_s": 8.0,
        "standby_delay_s": None,
        "placement_timeout_s": 9.0,
    }
    assert resolve(MODEL, **limits).recovery == RecoveryConfig(**limits)
    timeouts = {"init_timeout_s": 1.0, "execute_timeout_s": 2.0, "shutdown_timeout_s": 3.0, "spin_window_s": 4.0}
    executor = resolve(MODEL, **timeouts, channel_capacity_bytes=8192).executor
    assert executor == ExecutorConfig("inline", **timeouts, channel_capacity_bytes=8192)


def test_paths_may_be_path_objects_and_numbers_numpys() -> None:
    config = resolve(DEMO_MODEL_DIR, DEMO_MODEL_DIR, step_timeout_s=numpy.float64(2.5))
    assert (config.model.model, config.model.tokenizer) == (MODEL, MODEL)
    assert type(config.recovery.step_timeout_s) is float
    assert EngineConfig.decode(config.encode()) == config


def test_one_worker_runs_inline_unless_asked_otherwise() -> None:
    assert resolve(MODEL).executor.backend == "inline"
    assert resolve(MODEL, tensor_parallel_size=2).executor.backend == "ray"
    assert resolve(MODEL, executor_backend="ray").executor.backend == "ray"


def test_relative_paths_become_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DEMO_MODEL_DIR.parent)
    config = resolve(DEMO_MODEL_DIR.name, tokenizer=".")
    assert config.model.model == MODEL
    assert config.model.tokenizer == str(DEMO_MODEL_DIR.parent)


@pytest.mark.parametrize(("given", "decided"), [("float", "float32"), ("half", "float16"), ("bfloat16", "bfloat16")])
def test_short_names_of_dtypes_are_resolved(given: str, decided: str) -> None:
    assert resolve(MODEL, dtype=given).model.dtype == decided


def test_a_worker_class_is_stored_by_its_name() -> None:
    assert resolve(MODEL, worker_cls=MyWorker).parallel.worker_cls == f"{__name__}.MyWorker"
    assert resolve(MODEL, worker_cls="package.module.Class").parallel.worker_cls == "package.module.Class"
    assert resolve(MODEL, scheduler_cls=MyWorker).scheduler.scheduler_cls == f"{__name__}.MyWorker"


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"max_num_seqs": 0}, ["max_num_seqs=0", "positive"]),
        ({"block_size": -16}, ["block_size=-16", "from 1 to 1024"]),
        ({"block_size": 16.0}, ["block_size=16.0", "integer"]),
        ({"block_size": 2048}, ["block_size=2048", "1024"]),
        ({"data_parallel_size": True}, ["data_parallel_size=True", "integer"]),
        ({"max_model_len": 0}, ["max_model_len=0", "positive"]),
        ({"max_model_len": 1025}, ["max_model_len=1025", "1024"]),
        ({"num_threads": 0}, ["num_threads=0", "positive"]),
        ({"max_num_seqs": 256, "max_num_batched_tokens": 64}, ["max_num_batched_tokens=64", "max_num_seqs=256"]),
        ({"gpu_memory_utilization": 0.0}, ["gpu_memory_utilization=0.0"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization=1.5"]),
        ({"long_prefill_token_threshold": -1}, ["long_prefill_token_threshold=-1"]),
        ({"dtype": "int8"}, ["dtype='int8'", "'bfloat16'"]),
        ({"load_format": "tensorizer"}, ["load_format='tensorizer'", "'dummy'"]),
        ({"placement_strategy": "pack"}, ["placement_strategy='pack'", "'span'"]),
        ({"executor_backend": "mp"}, ["executor_backend='mp'", "'inline'"]),
        ({"executor_transport": "tcp"}, ["executor_transport='tcp'", "'channel'"]),
        ({"gc_debug": -1}, ["gc_debug=-1"]),
        ({"executor_wait": "sleep"}, ["executor_wait='sleep'", "'adaptive'"]),
        ({"scheduling_policy": "lifo"}, ["scheduling_policy='lifo'", "'priority'"]),
        ({"device": "tpu"}, ["device='tpu'", "'cuda'"]),
        ({"kv_cache_dtype": "fp8", "device": "cpu"}, ["kv_cache_dtype='fp8'", "a GPU", "'int8_per_token_head'"]),
        (
            {"kv_cache_dtype": "int8_per_token_head", "device": "cuda"},
            ["kv_cache_dtype='int8_per_token_head'", "a CPU", "device='cuda'", "'fp8'"],
        ),
        (
            {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "torch"},
            ["kv_cache_dtype='fp8_e4m3'", "needs attention_backend='triton'", "attention_backend='torch'"],
        ),
        (
            {"kv_cache_dtype": "int8_per_token_head", "attention_backend": "triton"},
            ["needs attention_backend='native'", "attention_backend='triton'"],
        ),
        ({"tensor_parallel_size": 3}, ["tensor_parallel_size=3", "num_attention_heads=4"]),
        ({"engine_name": "my engine"}, ["engine_name='my engine'"]),
        ({"engine_name": ""}, ["engine_name=''"]),
        ({"wait_for_nodes_s": -1}, ["wait_for_nodes_s=-1", "seconds"]),
        ({"wait_for_nodes_s": float("nan")}, ["wait_for_nodes_s=nan"]),
        ({"wait_for_nodes_s": float("inf")}, ["wait_for_nodes_s=inf"]),
        ({"wait_for_nodes_s": "soon"}, ["wait_for_nodes_s='soon'"]),
        ({"dp_sync_interval": 0}, ["dp_sync_interval=0", "positive"]),
        ({"restart_window_s": 0}, ["restart_window_s=0", "a positive number of seconds"]),
        ({"max_rank_restarts": 1.5}, ["max_rank_restarts=1.5", "an integer, 0 or more"]),
        ({"standby_delay_s": -1}, ["standby_delay_s=-1", "a number of seconds, 0 or more, or None"]),
        ({"channel_capacity_bytes": 10}, ["channel_capacity_bytes=10", "4096 or more"]),
        ({"enable_prefix_caching": "no"}, ["enable_prefix_caching='no'", "True or False"]),
        ({"seed": 2**63}, ["seed=9223372036854775808", "64-bit integer"]),
        ({"tokenizer": 5}, ["tokenizer=5", "a string"]),
        ({"worker_cls": 5}, ["worker_cls=5", "package.module.Class"]),
        ({"scheduler_cls": type("Local", (), {"__module__": "__main__"})}, ["scheduler_cls='__main__.Local'"]),
        ({"max_num_sequences": 5}, ["unknown option 'max_num_sequences'", "did you mean max_num_seqs?"]),
        ({"colour": "red"}, ["unknown option 'colour'", "docs/options.md"]),
        ({"enable_expert_parallel": True}, ["enable_expert_parallel=True", "LlamaForCausalLM"]),
        (
            {"executor_backend": "inline", "tensor_parallel_size": 2},
            ["executor_backend='inline'", "tensor_parallel_size=2 needs 2:", "executor_backend='ray'"],
        ),
        (
            {"executor_backend": "inline", "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            ["executor_backend='inline'", "tensor_parallel_size=2 and pipeline_parallel_size=2 need 4:"],
        ),
        ({"pipeline_parallel_size": 5}, ["pipeline_parallel_size=5", "4 layers"]),
        ({"pipeline_parallel_size": 65}, ["pipeline_parallel_size=65", "64"]),
        ({"pipeline_parallel_size": 2, "pipeline_layers": "2,3"}, ["pipeline_layers=2,3", "4 layers"]),
        ({"pipeline_parallel_size": 2, "pipeline_layers": [4, 0]}, ["pipeline_layers=4,0", "at least 1"]),
        ({"pipeline_layers": "two"}, ["pipeline_layers='two'", "separated by commas"]),
    ],
)
def test_impossible_options_are_refused_by_name(options: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(InvalidConfig) as raised:
        resolve(MODEL, **options)
    for fragment in fragments:
        assert fragment in str(raised.value)


@pytest.mark.parametrize(
    ("options", "is_lockstep"),
    [
        ({"data_parallel_size": 2}, False),
        ({"enable_expert_parallel": True}, False),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2}, False),
        ({"enable_expert_parallel": True, "data_parallel_size": 2, "dp_sync_interval": 4}, True),
    ],
)
def test_only_ranks_that_share_experts_run_in_lockstep(
    tmp_path: Path, options: dict[str, Any], is_lockstep: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MixtralForCausalLM"]}))
    parallel = resolve(str(tmp_path), **options).parallel
    assert parallel.is_lockstep == is_lockstep
    assert parallel.dp_sync_interval == options.get("dp_sync_interval", 1)
    assert resolve(str(tmp_path), max_concurrent_batches=2, **options).max_steps_in_flight == 2


def test_how_a_checkpoint_is_stored_may_be_said_and_is_checked(tmp_path: Path) -> None:
    awq = tmp_path / "awq"
    shutil.copytree(DEMO_MODEL_DIR, awq)
    config = json.loads((awq / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    (awq / "config.json").write_text(json.dumps(config))
    assert resolve(str(awq), quantization="awq").model.quantization is None
    with pytest.raises(InvalidConfig, match=r"quantization='gptq', but .* its weights are stored as 'awq': omit it"):
        resolve(str(awq), quantization="gptq")


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="org/model isn't a directory"):
        resolve(str(tmp_path / "org/model"))


@pytest.mark.parametrize(
    ("named", "expected"),
    [("<|im_end|>", [0, 3]), ("<|endoftext|>", [0]), (None, [0]), ("<|unheard of|>", [0])],
)
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_the_tokenizers_end_of_sequence_ends_outputs_too(
    tmp_path: Path, named: str | None, expected: list[int], is_elsewhere: bool
) -> None:
    """`generation_config.json` may be the base model's, and `eos_token` the fine-tuned model's."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, model)
    tokenizer = Path(shutil.copytree(model, tmp_path / "tokenizer")) if is_elsewhere else model
    (model / "generation_config.json").write_text('{"eos_token_id": 0}')
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    assert resolve(model, tokenizer).model.spec.eos_token_ids == expected
    (tokenizer / "tokenizer.json").unlink()
    assert resolve(model, tokenizer).model.spec.eos_token_ids == [0], "a missing tokenizer is named later"


@pytest.mark.parametrize(("num_steps", "is_async"), [(1, True), (2, False)])
def test_the_two_options_for_steps_in_flight_must_agree(num_steps, is_async):
    match = f"max_concurrent_batches={num_steps} contradicts async_scheduling={is_async}"
    with pytest.raises(InvalidConfig, match=match):
        resolve(MODEL, max_concurrent_batches=num_steps, async_scheduling=is_async)


@pytest.mark.parametrize(
    ("tp_size", "num_drafts", "expected"), [(1, 0, 14), (2, 0, 28), (16, 0, 227), (32, 0, 256), (1, 3, 4)]
)
def test_fewer_sequences_run_by_default_if_they_have_large_states(tp_size: int, num_drafts: int, expected: int) -> None:
    # Qwen3-Next's: 36 layers of 2 MiB
    state = DeltaSpec([True, True, True, False] * 12, 32, 128, 128, 4, num_k_heads=16, is_interleaved=True)
    spec = msgspec.structs.replace(SPEC, num_layers=len(state.layers), state=state)
    assert default_num_seqs(spec, tp_size, num_drafts) == expected
    assert default_num_seqs(SPEC, tp_size, num_drafts) == 256


@pytest.mark.parametrize("outside", [{}, {"reasoning_parser": "deepseek_r1"}])
def test_structured_outputs_config_may_name_the_reasoning_parser(outside: dict[str, str]) -> None:
    config = resolve(MODEL, structured_outputs_config={"reasoning_parser": "qwen3"}, **outside)
    assert config.reasoning_config is not None
    assert config.reasoning_config.reasoning_parser == (outside.get("reasoning_parser") or "qwen3")
    own = {"reasoning_start_str": "<a>", "reasoning_end_str": "</a>"}
    config = resolve(MODEL, structured_outputs_config={"reasoning_parser": "qwen3"}, reasoning_config=own)
    assert config.reasoning_config is not None
    assert config.reasoning_config.tags().opening == "<a>"


def test_all_log_probabilities_can_be_asked_for_if_the_limit_allows_the_vocabulary() -> None:
    size = resolve(MODEL).model.spec.vocab_size
    limits = {None: 20, 20: 20, size - 1: size - 1, size: -1, size + 1: -1, -1: -1}
    assert {most: resolve(MODEL, max_logprobs=most).model.max_http_logprobs for most in limits} == limits
