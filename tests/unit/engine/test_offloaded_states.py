"""Engines whose layers keep states, with a connector: the same tokens, and the same free blocks and rows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from families import make_checkpoint
from layer_connector import LayerConnector
from waiting import eventually

from raycore.activity import RUNNING, Activity
from raycore.client.held_prefixes import HeldPrefixes
from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.errors import InvalidConfig
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.parts.transfers.connectors.peers.hints import RemoteBlocks, as_hints
from raycore.parts.transfers.engine import ConnectorCalls
from raycore.parts.transfers.worker import WorkerTransfers
from raycore.sampling_params import SamplingParams
from raycore.scheduler.prefix_states import PrefixStates
from raycore.worker.rank import RankIdentity

FAMILIES = ["qwen3_next", "granitemoehybrid", "kimi_linear", "lfm2", "falcon_h1", "minimax", "jamba"]
PROMPT = [7 + index * index % 83 for index in range(101)]
PARAMS = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "batch_invariant": True,
    "num_threads": 1,
    "block_size": 4,
    "mamba_block_size": 16,
    "num_prefix_states": 12,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": 200,
    "num_gpu_blocks_override": 200,
}
SEQ_IDS = itertools.count()


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


def offload(**extra: Any) -> dict[str, Any]:
    extra = {"always_load": True, "cpu_bytes_to_use": 64 << 20, **extra}
    return {"kv_transfer_config": {"kv_connector": "OffloadConnector", "kv_connector_extra_config": extra}}


def make_core(path: Path, **options: Any) -> EngineCore:
    config = resolve(path, **LIMITS | options)
    return EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))


def submit(core: EngineCore, prompt: list[int], **fields: Any) -> int:
    seq_id = next(SEQ_IDS)
    core.submit(EngineRequest(seq_id, str(seq_id), prompt, PARAMS, seed=5, **fields))
    return seq_id


def remote(core: EngineCore, num_tokens: int) -> dict[str, Any]:
    """What a request is told of the blocks that an engine has."""
    (addresses,) = [part.addresses() for part in core.parts if isinstance(part, ConnectorCalls)]
    return as_hints(RemoteBlocks(list(addresses), num_tokens))


def finish(core: EngineCore, max_steps: int = 10**6) -> tuple[dict[int, list[int]], dict[int, int]]:
    """By seq_id: tokens, and how many of a prompt weren't computed."""
    tokens, cached = dict[int, list[int]](), dict[int, int]()
    for _ in range(max_steps):
        if not core.has_work():
            break
        outputs = core.step()
        core.scheduler.check_integrity()
        if outputs is not None:
            cached |= dict(outputs.started)
            for seq_id, token in zip(outputs.seq_ids.tolist(), outputs.token_ids.tolist(), strict=True):
                tokens.setdefault(seq_id, []).append(token)
    return tokens, cached


def run(core: EngineCore, prompt: list[int] = PROMPT, **fields: Any) -> tuple[list[int], int]:
    seq_id = submit(core, prompt, **fields)
    tokens, cached = finish(core)
    return tokens[seq_id], cached[seq_id]


def rows_in_use(core: EngineCore) -> tuple[int, int]:
    """How many rows have states of prefixes, and how many are reserved for some."""
    (part,) = [part for part in core.scheduler.parts if isinstance(part, PrefixStates)]  # pyright: ignore
    snapshots = part.snapshots
    return len(snapshots._row_of), len(snapshots._coming) + snapshots._kept.total()


def has_written(core: EngineCore) -> bool:
    def is_done(worker: Any) -> bool:
        writer = worker._parts[WorkerTransfers].connector._writer
        return writer is None or writer._num_waiting_bytes == 0

    return core.executor.collective_rpc(is_done) == [True]


@pytest.mark.parametrize("in_files", [False, True])
def test_states_come_back_with_their_prefixes(path: Path, tmp_path: Path, in_files: bool) -> None:
    options = offload(path=str(tmp_path), cpu_bytes_to_use=0) if in_files else offload()
    plain, core = make_core(path), make_core(path, **options)
    assert core.cache.num_state_parts >= 1
    expected = run(plain)[0]
    assert run(core) == (expected, 0)
    assert rows_in_use(core) == rows_in_use(plain)
    whole = [*PROMPT, *expected]
    # those after 16 · n tokens are kept, and the one after the last full block of a prompt
    for prompt, num_found in ((PROMPT, 100), (PROMPT[:50], 48), (whole, 128), ([*PROMPT[:70], 3, 4, 5], 64)):
        for each in (plain, core):
            assert each.scheduler.reset_prefix_cache()
        eventually(lambda: has_written(core))
        assert run(core, prompt) == (run(plain, prompt)[0], num_found)
        assert rows_in_use(core)[1] == 0
        assert core.scheduler.load().kv_usage == 0.0
    found = core.scheduler.load().external
    assert (found.disk, found.host) == ((340, 0) if in_files else (0, 340))
    core.shutdown()
    plain.shutdown()


def test_a_restarted_engine_finds_states_in_files(path: Path, tmp_path: Path) -> None:
    options = offload(path=str(tmp_path), cpu_bytes_to_use=0)
    core = make_core(path, **options)
    expected = run(core)[0]
    core.shutdown()
    core = make_core(path, **options)
    assert run(core) == (expected, 100)
    # the prefix has its state, so others begin there without the connector
    assert run(core) == (expected, 100)
    assert core.scheduler.load().external.disk == 100
    core.shutdown()


def test_a_prefix_whose_state_is_lost_or_damaged_is_computed(path: Path, tmp_path: Path) -> None:
    options = offload(path=str(tmp_path), cpu_bytes_to_use=0)
    core = make_core(path, **options)
    expected, parts = run(core)[0], core.cache.num_state_parts
    core.shutdown()
    files = sorted(tmp_path.rglob("*.kv"), key=lambda file: file.stat().st_mtime_ns)
    assert len(files) > 25 + parts
    for file in files:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    core = make_core(path, **options)
    assert run(core) == (expected, 0)
    assert rows_in_use(core)[1] == 0
    core.shutdown()


def test_preemptions_and_aborts_leave_tokens_blocks_and_rows_as_they_are(path: Path) -> None:
    prompts = [PROMPT, PROMPT[:61], [3, *PROMPT[:90]], PROMPT[:80]]
    plain = make_core(path)
    expected = [run(plain, prompt)[0] for prompt in prompts]
    plain.shutdown()
    core = make_core(path, **offload(), num_gpu_blocks_override=56, num_prefix_states=3)
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
        assert rows_in_use(core)[1] == 0
    assert core.scheduler.load().external.host > 0
    core.shutdown()


def test_sleep_keeps_states_that_are_on_the_host(path: Path) -> None:
    core = make_core(path, **offload())
    expected = run(core)[0]
    core.pause()
    core.set_activity(Activity(True, 1, ("kv_cache", "weights")))
    core.set_activity(RUNNING)
    assert run(core) == (expected, 100)
    core.shutdown()


def test_guesses_and_states_from_elsewhere_give_the_same_tokens(path: Path) -> None:
    plain = make_core(path)
    expected = run(plain)[0]
    plain.shutdown()
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    core = make_core(path, **offload(), speculative_config=guesses)
    assert run(core) == (expected, 0)
    assert core.scheduler.reset_prefix_cache()
    assert run(core) == (expected, 100)
    core.shutdown()


def test_connectors_that_know_no_states_are_refused(path: Path) -> None:
    kind = f"layer_connector.{LayerConnector.__name__}"
    with pytest.raises(InvalidConfig, match=r"has layers that keep a state: omit it, or use a connector that sets"):
        resolve(path, **LIMITS, kv_transfer_config={"kv_connector": kind})


@pytest.mark.parametrize("num_tokens", [100, 96, 64])
def test_a_rank_reads_states_of_another(path: Path, num_tokens: int) -> None:
    extra = {"min_fetch_tokens": 4, "compare_costs": False}
    options = {"kv_transfer_config": {"kv_connector": "PeersConnector", "kv_connector_extra_config": extra}}
    owner, reader = make_core(path, **options), make_core(path, **options)
    expected = run(owner)[0]
    assert run(reader, hints=remote(owner, num_tokens)) == (expected, num_tokens)
    counts = reader.executor.collective_rpc(lambda worker: worker._parts[WorkerTransfers].connector.counts)[0]
    assert counts["read"] == num_tokens // 4 + reader.cache.num_state_parts
    assert rows_in_use(reader)[1] == 0
    # the other one lets read what it has read itself
    third = make_core(path, **options)
    assert run(third, hints=remote(reader, num_tokens)) == (expected, num_tokens)
    # there is no state after these tokens
    assert third.scheduler.reset_prefix_cache()
    assert run(third, hints=remote(owner, 92)) == (expected, 0)
    for core in (owner, reader, third):
        core.shutdown()


def test_a_rank_goes_on_from_the_last_state_of_a_prompt_that_another_has_computed(path: Path) -> None:
    plain = make_core(path)
    extra = {"min_fetch_tokens": 4}
    options = {"kv_transfer_config": {"kv_connector": "DisaggregationConnector", "kv_connector_extra_config": extra}}
    prefill, decode = make_core(path, **options), make_core(path, **options)
    for length in (101, 100, 33):
        prompt = PROMPT[:length]
        expected = run(plain, prompt)[0]
        seq_id, hints = submit(prefill, prompt, hands_over=True), None
        while hints is None:
            outputs = prefill.step()
            hints = None if outputs is None else dict(outputs.hints).get(seq_id)
        num_tokens = (length - 1) // 4 * 4
        assert hints["num_tokens"] == num_tokens
        prefill.step()  # tells the worker what others may read
        assert run(decode, prompt, hints=hints) == (expected, num_tokens)
        eventually(lambda: (prefill.step() or True) and not prefill.has_work())
        for core in (plain, prefill, decode):
            core.scheduler.check_integrity()
            assert core.scheduler.reset_prefix_cache()
            assert core.scheduler.load().kv_usage == 0.0
    for core in (plain, prefill, decode):
        core.shutdown()


def test_what_a_rank_says_that_it_has_is_what_it_has(path: Path) -> None:
    extra = {"min_fetch_tokens": 4, "compare_costs": False}
    options = {"kv_transfer_config": {"kv_connector": "PeersConnector", "kv_connector_extra_config": extra}}
    core = make_core(path, **options, num_prefix_states=3)
    held, position = HeldPrefixes(4, has_states=True), -1
    for prompt in (PROMPT, [5, *PROMPT], PROMPT[:60]):
        run(core, prompt)
        assert core.cache_log is not None
        changes, position = core.cache_log.since(position)
        assert changes is not None
        held.take(0, changes)
        (part,) = [part for part in core.scheduler.parts if isinstance(part, PrefixStates)]  # pyright: ignore
        for each in (PROMPT, [5, *PROMPT], [*PROMPT[:70], 1, 2]):
            keys = held.keys(each)
            assert sum(more for _, more in held.match_stored(keys)) == 4 * part.snapshots.longest(keys)
    core.shutdown()
