"""The states of prefixes in other places: what connectors are told, and what a load with a state may be."""

from __future__ import annotations

from typing import Any

import pytest
from fake_connector import Chances, FakeGroupsConnector
from fake_engine_core import FakeEngineCore
from scheduler_parts import part_of

from raycore.kvcache.snapshots import NO_ROW, Snapshots
from raycore.parts.transfers.connectors.groups import block_name
from raycore.parts.transfers.scheduler.state_blocks import NO_STATES, StateBlocks
from raycore.parts.transfers.scheduler.transfers import Transfers
from raycore.scheduler.prefix_states import PrefixStates

PROMPT = list(range(1, 31))
"""7 full blocks of 4, and 2 tokens."""


def make_engine(num_rows: int = 6, num_parts: int = 2, **chances: float) -> FakeEngineCore:
    chosen = Chances(**({"is_async": 1.0, "is_done": 1.0} | chances))
    connector = FakeGroupsConnector(4, chosen, num_state_parts=num_parts)
    return FakeEngineCore(connector=connector, num_prefix_states=num_rows, mamba_block_size=8)


def run(engine: FakeEngineCore, prompt: list[int] = PROMPT) -> int:
    """How many of the prompt's tokens weren't computed."""
    seq_id = engine.submit(prompt, max_tokens=3)
    engine.run()
    return engine.started[seq_id]


def snapshots_of(engine: FakeEngineCore) -> Snapshots:
    return part_of(engine.scheduler, PrefixStates).snapshots


def test_parts_of_a_row_are_blocks_of_groups_after_the_others() -> None:
    blocks = StateBlocks(Snapshots(range(5)), 3)
    assert list(blocks.groups(2)) == [2, 3, 4]
    assert blocks.blocks_of(4, 100) == [112, 113, 114]
    assert blocks.blocks_of(NO_ROW, 100) == list(NO_STATES.groups(2)) == []


def test_a_load_with_a_state_is_asynchronous_and_needs_a_row() -> None:
    snapshots = Snapshots(range(1))
    blocks = StateBlocks(snapshots, 1)
    assert (blocks.may_load(is_async=False), blocks.may_load(is_async=True)) == (False, True)
    row = blocks.reserve()
    assert not blocks.may_load(is_async=True)
    snapshots.let_go(row)
    assert blocks.may_load(is_async=True)
    assert NO_STATES.may_load(is_async=False)
    assert NO_STATES.reserve() == NO_ROW


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_a_prefix_comes_back_as_far_as_there_is_a_state(num_parts: int) -> None:
    engine = make_engine(num_parts=num_parts)
    assert run(engine) == 0
    # states after 8, 16, 24 and 28 tokens
    for prompt, num_found in ((PROMPT, 28), (PROMPT[:27], 24), (PROMPT[:23], 16), (PROMPT[:8], 0)):
        engine.scheduler.reset_prefix_cache()
        assert run(engine, prompt) == num_found
    assert not snapshots_of(engine)._coming
    assert not snapshots_of(engine)._kept.total()


def test_others_begin_with_a_state_that_a_load_has_brought() -> None:
    engine = make_engine()
    run(engine)
    engine.scheduler.reset_prefix_cache()
    run(engine)
    num_loaded = engine.connector.num_loaded
    assert run(engine) == 28
    assert engine.connector.num_loaded == num_loaded


def test_what_is_offered_without_waiting_is_computed() -> None:
    engine = make_engine()
    run(engine)
    engine.scheduler.reset_prefix_cache()
    offers = engine.connector.get_num_new_matched_tokens
    engine.connector.get_num_new_matched_tokens = lambda *args: (offers(*args)[0], False)
    assert run(engine) == 0
    assert engine.connector.num_loaded == 0


@pytest.mark.parametrize("lacks", ["a block", "a part"])
def test_a_load_that_lacks_anything_counts_for_nothing(lacks: str) -> None:
    engine = make_engine()
    run(engine)
    engine.scheduler.reset_prefix_cache()
    num_blocks, end = len(engine.runner.kv_tokens), engine.connector.end

    def lose(runner: Any) -> Any:
        report = end(runner)
        if report is not None and report.received:
            loads = engine.connector.orders_seen[-1]
            report.failed_blocks = [max(loads) if lacks == "a part" else max(x for x in loads if x < num_blocks)]
        return report

    engine.connector.orders_seen = []
    told = engine.connector.update_state_after_alloc_all_groups

    def note(request: Any, block_ids: Any, num_tokens: int) -> None:
        engine.connector.orders_seen.append([each for ids in block_ids for each in ids])
        told(request, block_ids, num_tokens)

    engine.connector.update_state_after_alloc_all_groups = note
    engine.connector.end = lose
    assert run(engine) == 0
    assert engine.connector.num_loaded == 28
    assert not snapshots_of(engine)._coming


def test_an_aborted_request_keeps_its_row_while_that_is_written() -> None:
    engine = make_engine(is_done=0.0)
    run(engine)
    engine.scheduler.reset_prefix_cache()
    seq_id = engine.submit(PROMPT, max_tokens=3)
    engine.step()
    snapshots = snapshots_of(engine)
    assert len(snapshots._coming) == 1
    engine.abort(seq_id)
    engine.scheduler.reset_prefix_cache()
    engine.step()
    assert len(snapshots._coming) == 1
    engine.connector.chances.is_done = 1.0
    engine.run()
    assert not snapshots._coming
    assert len(snapshots._free) == 6


def test_a_connector_knows_which_states_there_are() -> None:
    engine = make_engine(num_rows=2)
    known: dict[bytes, int] = {}
    stored, removed = engine.connector.blocks_stored_of_group, engine.connector.block_removed_of_group

    def note(request: Any, digests: Any, block_ids: Any, first: int, group: int) -> None:
        if group:
            assert block_name(digests[0], group) not in known
            known[block_name(digests[0], group)] = block_ids[0]
        stored(request, digests, block_ids, first, group)

    def drop(digest: bytes, group: int) -> None:
        if group:
            del known[block_name(digest, group)]
        removed(digest, group)

    engine.connector.blocks_stored_of_group, engine.connector.block_removed_of_group = note, drop
    num_blocks = len(engine.runner.kv_tokens)
    for first in (0, 10, 19):
        run(engine, [first + each for each in PROMPT])
        rows = snapshots_of(engine)._row_of.items()
        assert known == {
            block_name(digest, group): num_blocks + row * 2 + group - 1 for digest, row in rows for group in (1, 2)
        }
    assert len(known) == 4


def test_a_request_whose_state_is_forgotten_before_it_begins_loads_it_again() -> None:
    engine = make_engine()
    run(engine)
    engine.scheduler.reset_prefix_cache()
    seq_id = engine.submit(PROMPT, max_tokens=3)
    transfers = part_of(engine.scheduler, Transfers)
    while not transfers._loaded:
        engine.step()
    transfers._lose_blocks({len(engine.runner.kv_tokens) - 1})
    engine.scheduler.check_integrity()
    engine.run()
    assert engine.started[seq_id] == 28
    assert engine.connector.num_loaded == 2 * 28


def test_wrong_blocks_are_not_followed_by_the_states_that_were_kept() -> None:
    engine = make_engine()
    run(engine)
    transfers, snapshots = part_of(engine.scheduler, Transfers), snapshots_of(engine)
    assert snapshots._row_of
    transfers._lose_blocks({0})
    assert not snapshots._row_of
    snapshots.check_integrity()
