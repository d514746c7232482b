"""Engines whose blocks come back from the host's memory, from files, or from a connector of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from families import make_checkpoint
from layer_connector import LayerConnector
from msgspec.msgpack import decode
from msgspec.structs import replace
from native_kernels import needs_kernels
from waiting import eventually

from raycore.activity import RUNNING, Activity
from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.errors import InvalidConfig
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest, ExternalHits
from raycore.parts.transfers.connectors.connector import connector_class
from raycore.parts.transfers.connectors.offload.connector import OffloadConnector
from raycore.parts.transfers.engine import ConnectorCalls
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

LIMITS: dict[str, Any] = {"num_threads": 1, "block_size": 8, "max_model_len": 200, "num_gpu_blocks_override": 40}
PARAMS = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True)
PROMPT = [7 + index * index % 83 for index in range(101)]
NUM_CACHED = 96


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama3", tmp_path_factory.mktemp("llama3"))


def make_core(path: Path, extra: dict[str, Any] | None = None, **options: Any) -> EngineCore:
    if extra is not None:
        extra = {"always_load": True, **extra}
        options["kv_transfer_config"] = {"kv_connector": "OffloadConnector", "kv_connector_extra_config": extra}
    config = resolve(path, **{"dtype": "float32", **LIMITS, **options})
    return EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))


def run(
    core: EngineCore, prompt: list[int] = PROMPT, params: SamplingParams = PARAMS
) -> tuple[list[int], int, list[Any]]:
    """The tokens, how many of the prompt's tokens weren't computed, and what the connector tells the client."""
    seq_id = next(SEQ_IDS)
    core.submit(EngineRequest(seq_id, str(seq_id), prompt, params, seed=5))
    tokens: list[int] = []
    num_cached, told = -1, []
    while core.has_work():
        outputs = core.step()
        core.scheduler.check_integrity()
        if outputs is not None:
            tokens += outputs.token_ids.tolist()
            num_cached = dict(outputs.started).get(seq_id, num_cached)
            told += [decode(report.data) for _, report in outputs.reports]
    return tokens, num_cached, told


SEQ_IDS: Iterator[int] = iter(range(10**6))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[int]:
    core = make_core(checkpoint)
    tokens = run(core)[0]
    core.shutdown()
    return tokens


def connector_of(core: EngineCore) -> Any:
    (connector,) = [part.connector for part in core.parts if isinstance(part, ConnectorCalls)]
    return connector


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"kv_cache_dtype": "int8_per_token_head", "dtype": "bfloat16"}, marks=needs_kernels)],
    ids=["plain", "int8"],
)
def test_blocks_come_back_from_the_host(checkpoint: Path, options: dict[str, Any]) -> None:
    core = make_core(checkpoint, {"cpu_bytes_to_use": 8 << 20}, **options)
    first = run(core)[0]
    assert core.scheduler.reset_prefix_cache()
    assert run(core)[:2] == (first, NUM_CACHED)
    assert core.scheduler.load().external == ExternalHits(2 * len(PROMPT), host=NUM_CACHED)
    core.shutdown()


def test_the_hosts_memory_is_bounded_and_forgets_what_was_used_the_longest_ago(checkpoint: Path) -> None:
    core = make_core(checkpoint, {"cpu_bytes_to_use": 1 << 18})
    connector = connector_of(core)
    num_slots = len(connector._free)
    assert 12 < num_slots < 200
    for first in range(0, num_slots, 10):
        run(core, [first, *PROMPT[:80]])
        assert len(connector._slot_of) + len(connector._free) == num_slots
    core.scheduler.reset_prefix_cache()
    assert run(core, [0, *PROMPT[:80]])[1] == 0
    assert run(core, [first, *PROMPT[:80]])[1] == 80
    core.shutdown()


def test_blocks_come_back_from_files_after_a_restart(checkpoint: Path, tmp_path: Path, expected: list[int]) -> None:
    core = make_core(checkpoint, {"path": str(tmp_path)})
    assert run(core)[0] == expected
    core.shutdown()
    core = make_core(checkpoint, {"path": str(tmp_path)})
    assert run(core)[:2] == (expected, NUM_CACHED)
    assert core.scheduler.load().external == ExternalHits(len(PROMPT), disk=NUM_CACHED)
    core.shutdown()
    # other weights, or another layout, have files of their own
    for options in ({"load_format": "dummy", "seed": 3}, {"dtype": "bfloat16"}):
        core = make_core(checkpoint, {"path": str(tmp_path)}, **options)
        assert run(core)[1] == 0
        core.shutdown()


def test_files_are_right_if_a_step_saves_more_blocks_than_the_host_holds(
    checkpoint: Path, tmp_path: Path, expected: list[int]
) -> None:
    extra = {"path": str(tmp_path), "cpu_bytes_to_use": 2 * 4096}
    for num_cached in (0, NUM_CACHED):
        core = make_core(checkpoint, extra)
        assert len(connector_of(core)._free) == 2
        assert run(core)[:2] == (expected, num_cached)
        core.shutdown()


@pytest.mark.parametrize("damaged", [0, 5])
def test_damaged_and_lost_files_are_computed(
    checkpoint: Path, tmp_path: Path, expected: list[int], damaged: int
) -> None:
    core = make_core(checkpoint, {"path": str(tmp_path)})
    run(core)
    core.shutdown()
    files = sorted(tmp_path.rglob("*.kv"), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(files[damaged].read_bytes())
    data[200] ^= 255
    files[damaged].write_bytes(data)
    core = make_core(checkpoint, {"path": str(tmp_path)})
    assert run(core)[:2] == (expected, damaged * 8)
    core.scheduler.reset_prefix_cache()
    eventually(files[damaged].exists)
    assert run(core)[:2] == (expected, NUM_CACHED)  # it was written again
    core.shutdown()


def test_adapters_and_prompts_whose_logprobs_are_returned_load_nothing(checkpoint: Path) -> None:
    core = make_core(checkpoint, {"cpu_bytes_to_use": 8 << 20})
    run(core)
    core.scheduler.reset_prefix_cache()
    seq_id = next(SEQ_IDS)
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    core.submit(EngineRequest(seq_id, "r", PROMPT, params, seed=5))
    started: dict[int, int] = {}
    while core.has_work():
        outputs = core.step()
        started |= {} if outputs is None else dict(outputs.started)
    assert started == {seq_id: 0}
    core.shutdown()


def test_a_reset_of_the_connector_forgets_everything(checkpoint: Path, tmp_path: Path) -> None:
    core = make_core(checkpoint, {"cpu_bytes_to_use": 8 << 20, "path": str(tmp_path)})
    run(core)
    reset = core.utilities.functions["reset_prefix_cache"]
    assert reset()
    assert run(core)[1] == NUM_CACHED
    assert reset(False, True)
    assert run(core)[1] == 0
    while core.has_work():
        core.step()
    core.shutdown()


def test_sleep_keeps_what_is_on_the_host(checkpoint: Path, expected: list[int]) -> None:
    core = make_core(checkpoint, {"cpu_bytes_to_use": 8 << 20})
    run(core)
    core.pause()
    core.set_activity(Activity(True, 1, ("kv_cache", "weights")))
    core.set_activity(RUNNING)
    assert run(core)[:2] == (expected, NUM_CACHED)
    core.shutdown()


def test_a_users_own_connector_saves_and_loads_layer_by_layer(checkpoint: Path, expected: list[int]) -> None:
    LayerConnector.kept.clear()
    LayerConnector.told_at_start.clear()
    settings = {
        "kv_connector": "LayerConnector",
        "kv_connector_module_path": "layer_connector",
        "kv_connector_extra_config": {"greeting": "hello"},
    }
    core = make_core(checkpoint, kv_transfer_config=settings)
    assert LayerConnector.told_at_start == [{0: b"hello"}]
    run(core)
    core.scheduler.reset_prefix_cache()
    tokens, num_cached, told = run(core, params=replace(PARAMS, extra_args={"kv_transfer_params": {"a": 1}}))
    assert (tokens, num_cached) == (expected, NUM_CACHED)
    (params,) = told
    assert params["params"] == {"a": 1}
    core.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_transfer_config": {"kv_connector": "OffloadConnector"}}, "cpu_bytes_to_use or path"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "enable_prefix_caching=False"),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadConnector", "kv_connector_extra_config": {"pth": "x"}}},
            "unknown setting 'pth'",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    config = resolve(checkpoint, **options)
    assert connector_class(config) is OffloadConnector
    with pytest.raises(InvalidConfig, match=message):
        connector_class(config).check(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_transfer_config": {"kv_connector": "Nothing"}}, "kv_connector='Nothing' is none of OffloadConnector"),
        ({"kv_transfer_config": {"kv_role": "kv_both"}}, "names no connector"),
        ({"kv_transfer_config": {"kv_connector": "a.B", "kv_role": "both"}}, "kv_role"),
        ({"kv_transfer_config": {"kv_connector": "a.B"}, "kv_offloading_size": 1.0}, "two connectors"),
        ({"kv_events_config": {"enable_kv_cache_events": True, "endpoint": "5557"}}, "endpoint='5557'"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        resolve(checkpoint, **options)
