"""Ranks of several workers keep blocks on the host and in files, and find the files again when they are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from faults import signal_in_step

from raycore import LLM, InitializationError, InvalidConfig, SamplingParams
from raycore.demo import demo_model_path
from raycore.parts.transfers.connectors.events import KVEventBatch

LIMITS: dict[str, Any] = {
    "num_threads": 1,
    "max_model_len": 512,
    "dtype": "float32",
    "block_size": 8,
    "num_gpu_blocks_override": 400,
    "batch_invariant": True,
}
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def transfer(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": "OffloadConnector", "kv_connector_extra_config": {"always_load": True, **extra}}


def prompts() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [3 + index, *(5 + at * at % 40 for at in range(100 + index))]} for index in range(4)]


def generate(llm: LLM) -> tuple[list[list[int]], list[int | None]]:
    outputs = llm.generate(prompts(), PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], [output.num_cached_tokens for output in outputs]


@pytest.fixture(scope="module")
def expected(ray_cluster) -> list[list[int]]:
    with LLM(demo_model_path(), **LIMITS) as llm:
        return generate(llm)[0]


@pytest.mark.parametrize(
    "parallel", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["workers", "stages"]
)
def test_blocks_of_several_workers_come_back(expected: list[list[int]], tmp_path: Path, parallel: dict[str, int]):
    config = transfer(cpu_bytes_to_use=32 << 20, path=str(tmp_path))
    with LLM(demo_model_path(), kv_transfer_config=config, **LIMITS, **parallel) as llm:
        assert generate(llm)[0] == expected
        assert llm.reset_prefix_cache()
        tokens, num_cached = generate(llm)
        assert tokens == expected
        assert min(num_cached) >= 96
        # a rank that dies with requests under way is replaced, and what takes its place finds the files
        info = llm.engine_infos[0]
        signal_in_step(llm, 0, info.worker_pids[1], num_steps=20)
        assert generate(llm)[0] == expected
        assert llm.engine_infos[0].pid != info.pid
        assert llm.reset_prefix_cache()
        tokens, num_cached = generate(llm)
        assert tokens == expected
        assert min(num_cached) >= 96
    assert {path.name.split(".")[-1] for path in tmp_path.rglob("*") if path.is_file()} == {"kv"}


@pytest.mark.parametrize(
    "parallel", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["workers", "stages"]
)
def test_states_of_several_workers_come_back(ray_cluster, checkpoints: Any, tmp_path: Path, parallel: dict[str, int]):
    limits = {**LIMITS, "max_model_len": 200, "mamba_block_size": 16, **parallel}
    path = checkpoints["qwen3_next"][0]
    with LLM(path, **limits) as llm:
        plain = generate(llm)[0]
    with LLM(path, kv_transfer_config=transfer(path=str(tmp_path)), **limits) as llm:
        assert generate(llm)[0] == plain
        info = llm.engine_infos[0]
        signal_in_step(llm, 0, info.worker_pids[1], num_steps=20)
        assert generate(llm)[0] == plain
        assert llm.engine_infos[0].pid != info.pid
        assert llm.reset_prefix_cache()
        tokens, num_cached = generate(llm)
        assert tokens == plain
        assert min(num_cached) >= 96


def test_events_leave_a_running_engine(ray_cluster):
    zmq = pytest.importorskip("zmq")
    context = zmq.Context()
    reader = context.socket(zmq.SUB)
    reader.setsockopt(zmq.SUBSCRIBE, b"")
    reader.setsockopt(zmq.RCVTIMEO, 20_000)
    port = reader.bind_to_random_port("tcp://127.0.0.1")
    # a publisher connects to an endpoint that names a host
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}
    try:
        with LLM(demo_model_path(), kv_events_config=events, **LIMITS) as llm:
            assert not reader.poll(200)  # takes in the connection, and subscribes
            generate(llm)
            batch = msgspec.msgpack.decode(reader.recv_multipart()[2], type=KVEventBatch)
        assert batch.data_parallel_rank == 0
        assert batch.events[0].token_ids[:2] == prompts()[0]["prompt_token_ids"][:2]
    finally:
        context.destroy(linger=0)


def test_a_directory_that_cannot_be_written_is_named(ray_cluster, tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(InitializationError, match=r"path=.*can't be written"):
        LLM(demo_model_path(), kv_transfer_config=transfer(path=str(path)), **LIMITS)


def test_settings_are_checked_before_anything_is_started():
    with pytest.raises(InvalidConfig, match="cpu_bytes_to_use or path"):
        LLM(demo_model_path(), kv_transfer_config=transfer(), **LIMITS)
