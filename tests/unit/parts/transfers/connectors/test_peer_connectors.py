"""What the two sides of the connectors tell each other, and when prefixes are read from other ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from raycore.cache_layout import CacheGroup, CacheLayout, CacheLimits, KVCacheConfig
from raycore.messages import StepPlan, TransferResult
from raycore.parts.transfers.config.kv_transfer import KVTransferConfig
from raycore.parts.transfers.connectors.connector import ConnectorSetup
from raycore.parts.transfers.connectors.peers.hints import RemoteBlocks, address_text, as_hints, read_hints
from raycore.parts.transfers.connectors.peers.notes import Arrived, Lease, ToScheduler, ToWorkers, WorkerInfo, split
from raycore.parts.transfers.connectors.peers.scheduler_side import DisaggregationScheduler, PeersScheduler
from raycore.parts.transfers.connectors.peers.settings import DisaggregationSettings, PeersSettings
from raycore.parts.transfers.connectors.peers.wire import PeerAddress
from raycore.parts.transfers.connectors.peers.worker_side import Leases

SETTINGS = PeersSettings(min_fetch_tokens=8)
DIGESTS = [bytes([number]) * 16 for number in range(10)]


def address(number: int) -> str:
    return address_text(PeerAddress("machine", f"local {number}", "host", 1, b"token", "layout"))


def setup(num_workers: int = 1, **settings: Any) -> Any:
    transfer = KVTransferConfig("connector", **settings)
    config: Any = SimpleNamespace(tokens_per_block=4, kv_transfer_config=transfer, engine_name="engine")
    cache = KVCacheConfig(9, CacheLayout((CacheGroup("full", ()),), CacheLimits(4, 64, 64)))
    return ConnectorSetup(config, cache, 0, num_workers)


def make(settings: PeersSettings = SETTINGS, num_workers: int = 1) -> PeersScheduler:
    side = PeersScheduler(setup(num_workers), settings)
    infos = {worker: msgspec.msgpack.encode(WorkerInfo(f"own {worker}", 1000)) for worker in range(num_workers)}
    side.set_xfer_handshake_metadata(infos)
    return side


def request(remote: RemoteBlocks | None, num_tokens: int = 41, **fields: object) -> Any:
    given = {"seq_id": 7, "tokens": np.zeros(num_tokens, np.int32), "digests": DIGESTS, "is_aborted": False}
    given |= {"hands_over": False, "kv_transfer_params": None, "hints": None if remote is None else as_hints(remote)}
    return SimpleNamespace(**given | fields)


def remote(num_tokens: int = 32, **fields: Any) -> RemoteBlocks:
    return RemoteBlocks([address(0)], num_tokens, **fields)


def told(side: PeersScheduler) -> ToWorkers | None:
    data = side.build_connector_meta(StepPlan(0))
    return None if data is None else msgspec.msgpack.decode(data, type=ToWorkers)


def test_what_the_other_rank_has_more_of_is_read():
    side = make()
    wanted = request(remote())
    assert side.get_num_new_matched_tokens(wanted, 8) == (24, True)
    side.update_state_after_alloc(wanted, list(range(20, 28)), 24)
    note = told(side)
    assert note is not None
    (fetch,) = note.fetches
    assert (fetch.seq_id, fetch.blocks, split(fetch.digests)) == (7, [22, 23, 24, 25, 26, 27], DIGESTS[2:8])
    assert told(side) is None
    # while it isn't reported, it isn't read again
    assert side.get_num_new_matched_tokens(wanted, 0) == (0, False)
    side.update_connector_output(TransferResult(received=[7]))
    assert side.get_num_new_matched_tokens(wanted, 0) == (32, True)


@pytest.mark.parametrize(
    ("where", "num_computed"),
    [
        (None, 0),
        (remote(), 32),
        (remote(), 28),  # fewer than `min_fetch_tokens`
        (remote(lease="y", num_tokens=3), 0),
        (RemoteBlocks([address(0), address(1)], 32), 0),
    ],
)
def test_other_requests_read_nothing(where: RemoteBlocks | None, num_computed: int):
    assert make().get_num_new_matched_tokens(request(where), num_computed) == (0, False)


def test_the_last_token_is_always_computed():
    assert make().get_num_new_matched_tokens(request(remote(400), num_tokens=32), 0) == (28, True)


def test_costs_decide_unless_the_other_rank_computed_the_prompt_for_this_one():
    side = make()
    for _ in range(20):
        side.observe_step(1_000_000, 0.001)
        arrived = ToScheduler([Arrived(1, 1000, 5.0, False, 0, "")])
        side.update_connector_output(TransferResult(reply=[msgspec.msgpack.encode(arrived)]))
    assert side.get_num_new_matched_tokens(request(remote()), 0) == (0, False)
    assert side.get_num_new_matched_tokens(request(remote(is_cheapest=True)), 0) == (32, True)


def test_workers_are_told_the_last_state_of_each_block():
    side = make()
    nobody = request(None)
    side.blocks_stored(nobody, DIGESTS[:3], [4, 5, 6], 0)
    side.block_removed(DIGESTS[1])
    side.block_removed(DIGESTS[8])
    side.blocks_stored(nobody, [DIGESTS[8]], [9], 0)
    assert side.has_pending_push_work()
    note = told(side)
    assert note is not None
    assert split(note.stored) == [DIGESTS[0], DIGESTS[2], DIGESTS[8]]
    assert note.stored_blocks == [4, 6, 9]
    assert set(split(note.removed)) == {*DIGESTS[:3], DIGESTS[8]}
    side.blocks_stored(nobody, [DIGESTS[0]], [1], 0)
    side.cache_cleared()
    note = told(side)
    assert note is not None
    assert (note.is_cleared, note.stored) == (True, b"")
    assert not side.has_pending_push_work()


def disaggregated(lease_s: float = 5, **settings: Any) -> DisaggregationScheduler:
    side = DisaggregationScheduler(setup(**settings), DisaggregationSettings(lease_s=lease_s, min_fetch_tokens=8))
    side.set_xfer_handshake_metadata({0: msgspec.msgpack.encode(WorkerInfo(address(0), 1000))})
    return side


def test_a_computed_prompt_is_kept_for_the_rank_that_goes_on():
    side = disaggregated(lease_s=5)
    keeps, hints = side.request_finished(request(None, hands_over=True, num_computed_tokens=34), list(range(9)))
    assert keeps
    found = read_hints(hints)
    assert found is not None
    assert (found.num_tokens, found.workers, found.is_cheapest) == (32, [address(0)], True)
    note = told(side)
    assert note is not None
    assert note.leases == [Lease(found.lease, 7, 5)]
    for other in (
        request(None, hands_over=True, num_computed_tokens=34, is_aborted=True),
        request(None, hands_over=True, num_computed_tokens=3),
        request(None, num_computed_tokens=34),
    ):
        assert side.request_finished(other, list(range(9))) == (False, None)


def test_blocks_are_kept_for_a_second_even_if_others_need_them(monkeypatch):
    now_s = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    side = disaggregated()
    for seq_id in (7, 8, 9):
        done = request(None, hands_over=True, seq_id=seq_id, num_computed_tokens=34)
        assert side.request_finished(done, list(range(9)))[0]
        now_s[0] += 0.5
    side.update_connector_output(TransferResult([8], [], []))
    assert [side.give_up_send(), side.give_up_send()] == [7, None]
    now_s[0] += 1
    assert [side.give_up_send(), side.give_up_send()] == [9, None]


def test_leases_of_blocks_that_are_not_read_end_with_their_requests():
    side = make()
    leased = remote(lease="a lease")
    aborted = request(leased, is_aborted=True)
    assert side.request_finished(aborted, []) == (False, None)
    note = told(side)
    assert note is not None
    assert [(each.workers, each.lease, each.blocks) for each in note.releases] == [([address(0)], "a lease", [])]
    assert note.fetches == []
    reading = request(leased)
    side.update_state_after_alloc(reading, list(range(8)), 32)
    side.request_finished(reading, list(range(8)))
    note = told(side)
    assert note is not None
    assert (len(note.fetches), note.releases) == (1, [])
    side.request_finished(request(remote()), [])  # without a lease
    assert told(side) is None


@pytest.mark.parametrize(("role", "takes", "gives"), [("kv_producer", False, True), ("kv_consumer", True, False)])
def test_an_engine_gives_or_takes_what_its_role_says(role: str, takes: bool, gives: bool):
    side = disaggregated(kv_role=role)
    assert side.get_num_new_matched_tokens(request(remote(256)), 0) == ((40, True) if takes else (0, False))
    assert bool(side.addresses) == gives
    side.blocks_stored(request(None), DIGESTS[:1], [4], 0)
    side.block_removed(DIGESTS[1])
    assert side.has_pending_push_work() == gives
    asking = request(None, kv_transfer_params={"do_remote_decode": True}, num_computed_tokens=34)
    assert side.request_finished(asking, list(range(9)))[0] == gives


def test_leases_end_when_they_are_released_or_after_their_time():
    leases = Leases()
    assert leases.take_ended() == []
    leases.add([Lease("a", 1, 60), Lease("b", 2, 60), Lease("c", 3, 0)])
    time.sleep(0.002)
    leases.release(["b", "unknown"])
    assert sorted(leases.take_ended()) == [2, 3]
    leases.release(["b"])
    assert leases.take_ended() == []
    leases.release(["early"])
    leases.add([Lease("early", 4, 60)])
    assert leases.take_ended() == [4]
    leases.clear()
    leases.release(["a"])
    assert leases.take_ended() == []
