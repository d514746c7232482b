"""Engines whose layers have windows, latents or states, with a connector: the same tokens, and the same free blocks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from families import make_checkpoint
from layer_connector import LayerConnector
from waiting import eventually

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.parts.transfers.connectors.peers.hints import RemoteBlocks, as_hints
from raycore.parts.transfers.engine import ConnectorCalls
from raycore.parts.transfers.worker import WorkerTransfers
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

WINDOWED = ["gemma3", "gpt_oss", "mistral"]
"""Windows of 17 tokens: in some of the layers, in half of them, in all."""
BLOCK_SIZE = 4
PROMPT = [7 + index * index % 83 for index in range(101)]
PARAMS = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "batch_invariant": True,
    "num_threads": 1,
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": 200,
    "num_gpu_blocks_override": 200,
}
ALWAYS = {"min_fetch_tokens": 4, "compare_costs": False}
SEQ_IDS = itertools.count()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: make_checkpoint(family, tmp_path_factory.mktemp(family))
        for family in [*WINDOWED, "deepseek_v3", "glm_moe_dsa"]
    }


def transfers(kind: str, **extra: Any) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": kind, "kv_connector_extra_config": extra}}


def offload(**extra: Any) -> dict[str, Any]:
    return transfers("OffloadConnector", always_load=True, **{"cpu_bytes_to_use": 16 << 20, **extra})


def make_core(path: Path, **options: Any) -> EngineCore:
    config = resolve(path, **LIMITS | options)
    return EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))


def submit(core: EngineCore, prompt: list[int] = PROMPT, **fields: Any) -> int:
    seq_id = next(SEQ_IDS)
    core.submit(EngineRequest(seq_id, str(seq_id), prompt, PARAMS, seed=5, **fields))
    return seq_id


def finish(core: EngineCore, max_steps: int = 10**6) -> tuple[dict[int, list[int]], dict[int, int], list[int]]:
    """By seq_id: tokens, and how many of a prompt weren't computed. And the number of free blocks after each step."""
    tokens, cached, free = dict[int, list[int]](), dict[int, int](), list[int]()
    while core.has_work() and len(free) < max_steps:
        outputs = core.step()
        core.scheduler.check_integrity()
        free.append(core.scheduler._pool.num_free)  # pyright: ignore[reportAttributeAccessIssue]
        if outputs is not None:
            cached |= dict(outputs.started)
            for seq_id, token in zip(outputs.seq_ids.tolist(), outputs.token_ids.tolist(), strict=True):
                tokens.setdefault(seq_id, []).append(token)
    return tokens, cached, free


def run(core: EngineCore, prompt: list[int] = PROMPT, **fields: Any) -> tuple[list[int], int, list[int]]:
    seq_id = submit(core, prompt, **fields)
    tokens, cached, free = finish(core)
    return tokens[seq_id], cached[seq_id], free


def remote(core: EngineCore, num_tokens: int) -> dict[str, Any]:
    """What a request is told of the blocks that an engine has."""
    (addresses,) = [part.addresses() for part in core.parts if isinstance(part, ConnectorCalls)]
    return {"hints": as_hints(RemoteBlocks(list(addresses), num_tokens))}


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("kind", ["host", "files", "peers"])
def test_windows_are_freed_with_a_connector_too(checkpoints: dict[str, Path], tmp_path: Path, family: str, kind: str):
    plain = make_core(checkpoints[family])
    expected, _, free = run(plain)
    assert any(plain.cache.layout.windows)
    options = {
        "host": offload(),
        "files": offload(path=str(tmp_path), cpu_bytes_to_use=0),
        "peers": transfers("PeersConnector", **ALWAYS),
    }[kind]
    core = make_core(checkpoints[family], **options)
    assert core.cache == plain.cache
    tokens, num_cached, found = run(core)
    plain.shutdown()
    core.shutdown()
    assert (tokens, num_cached) == (expected, 0)
    # steps that only tell workers of blocks come after the others
    assert found[: len(free)] == free


@pytest.mark.parametrize("family", [*WINDOWED, "deepseek_v3", "glm_moe_dsa"])
@pytest.mark.parametrize("in_files", [False, True])
def test_blocks_of_all_groups_come_back(
    checkpoints: dict[str, Path], tmp_path: Path, family: str, in_files: bool
) -> None:
    options = offload(path=str(tmp_path), cpu_bytes_to_use=0) if in_files else offload()
    core = make_core(checkpoints[family], **options)
    expected = run(core)[0]
    whole = [*PROMPT, *expected]
    for prompt, num_found in ((PROMPT, 100), (PROMPT[:50], 48), (whole, 128), ([*PROMPT[:70], 3, 4, 5], 68)):
        assert core.scheduler.reset_prefix_cache()
        eventually(lambda: has_written(core))
        tokens, num_cached, _ = run(core, prompt)
        plain = make_core(checkpoints[family])
        assert run(plain, prompt)[0] == tokens
        plain.shutdown()
        if core.cache.layout.keeps_all_in_one_group:
            assert num_cached == num_found
        else:
            # a long prompt gives back blocks of a window before they are all published
            assert num_found - 8 <= num_cached <= num_found
    core.shutdown()


def has_written(core: EngineCore) -> bool:
    def is_done(worker: Any) -> bool:
        writer = worker._parts[WorkerTransfers].connector._writer
        return writer is None or writer._num_waiting_bytes == 0

    return core.executor.collective_rpc(is_done) == [True]


@pytest.mark.parametrize("family", [*WINDOWED, "deepseek_v3", "glm_moe_dsa"])
def test_a_rank_reads_blocks_of_all_groups_of_another(checkpoints: dict[str, Path], family: str) -> None:
    owner, reader = (make_core(checkpoints[family], **transfers("PeersConnector", **ALWAYS)) for _ in range(2))
    expected = run(owner)[0]
    tokens, num_cached, _ = run(reader, **remote(owner, 100))
    assert (tokens, num_cached) == (expected, 100)
    counts = reader.executor.collective_rpc(lambda worker: worker._parts[WorkerTransfers].connector.counts)[0]
    layout = reader.cache.layout
    assert counts["read"] == sum(
        100 // BLOCK_SIZE if window is None else -(-(window - 1) // BLOCK_SIZE) for window in layout.windows
    )
    # what the other one has lost of a window is computed
    assert owner.scheduler.reset_prefix_cache()
    assert reader.scheduler.reset_prefix_cache()
    run(owner, [5, *PROMPT[:30]])
    tokens, num_cached, _ = run(reader, **remote(owner, 100))
    assert (tokens, num_cached) == (expected, 0)
    owner.shutdown()
    reader.shutdown()


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_preemptions_and_aborts_leave_tokens_and_blocks_as_they_are(checkpoints: dict[str, Path], family: str) -> None:
    prompts = [PROMPT, PROMPT[:61], [3, *PROMPT[:90]], PROMPT[:80]]
    plain = make_core(checkpoints[family])
    expected = [run(plain, prompt)[0] for prompt in prompts]
    plain.shutdown()
    layout = plain.cache.layout
    core = make_core(checkpoints[family], **offload(), num_gpu_blocks_override=layout.num_blocks_for(200) + 6)
    for number in range(3):
        seq_ids = [submit(core, prompt) for prompt in prompts]
        extra = submit(core, [*PROMPT, number])
        begun = finish(core, 12 + 7 * number)[0]
        core.abort([extra])
        assert core.scheduler.reset_prefix_cache(reset_running_requests=True)
        rest = finish(core)[0]
        tokens = {seq_id: begun.get(seq_id, []) + rest.get(seq_id, []) for seq_id in seq_ids}
        assert list(tokens.values()) == expected
        assert core.scheduler.load().kv_usage == 0.0
    load = core.scheduler.load()
    assert load.num_preemptions > 0
    assert load.external.host > 0
    core.shutdown()


@pytest.mark.parametrize("family", ["gemma3", "glm_moe_dsa"])
def test_a_connector_that_knows_one_group_gets_all_blocks_of_it(checkpoints: dict[str, Path], family: str) -> None:
    LayerConnector.kept.clear()
    path = checkpoints[family]
    options = {"kv_connector": "layer_connector.LayerConnector", "kv_connector_extra_config": {"greeting": "hello"}}
    plain = make_core(path)
    expected = run(plain)[0]
    plain.shutdown()
    core = make_core(path, kv_transfer_config=options)
    assert core.cache.layout.windows == [None]
    assert run(core)[:2] == (expected, 0)
    assert core.scheduler.reset_prefix_cache()
    core.executor.collective_rpc(forget_pages)
    assert run(core)[:2] == (expected, 100)
    core.shutdown()


def forget_pages(worker: Any) -> None:
    """Overwrite all that the cache has, so that what isn't loaded is missed."""
    for page in worker._parts[WorkerTransfers].connector.caches.pages:
        page.fill_(63)
