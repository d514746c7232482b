"""What the two sides of the connectors tell each other, and when prefixes are read from other ranks."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from raycore.messages import StepPlan, TransferResult
from raycore.parts.transfers.connectors.connector import ConnectorSetup
from raycore.parts.transfers.connectors.peers.hints import TransferParams, as_params, read_params
from raycore.parts.transfers.connectors.peers.notes import Arrived, Lease, ToScheduler, ToWorkers, WorkerInfo, split
from raycore.parts.transfers.connectors.peers.scheduler_side import DisaggregationScheduler, PeersScheduler
from raycore.parts.transfers.connectors.peers.settings import DisaggregationSettings, PeersSettings
from raycore.parts.transfers.connectors.peers.wire import PeerAddress
from raycore.parts.transfers.connectors.peers.worker_side import Leases

SETTINGS = PeersSettings(min_fetch_tokens=8)
DIGESTS = [bytes([number]) * 16 for number in range(10)]


def address(number: int) -> str:
    from raycore.parts.transfers.connectors.peers.hints import address_text

    return address_text(PeerAddress("machine", f"local {number}", "host", 1, b"token", "layout"))


def setup(num_workers: int = 1) -> Any:
    config: Any = SimpleNamespace(
        tokens_per_block=4, kv_transfer_config=SimpleNamespace(engine_id=None), engine_name="engine"
    )
    cache: Any = None
    return ConnectorSetup(config, cache, 0, num_workers)


def make(settings: PeersSettings = SETTINGS, num_workers: int = 1) -> PeersScheduler:
    side = PeersScheduler(setup(num_workers), settings)
    infos = {worker: msgspec.msgpack.encode(WorkerInfo(f"own {worker}", 1000)) for worker in range(num_workers)}
    side.set_xfer_handshake_metadata(infos)
    return side


def request(params: TransferParams | None, num_tokens: int = 41, **fields: object) -> Any:
    given = {"seq_id": 7, "tokens": np.zeros(num_tokens, np.int32), "digests": DIGESTS, "is_aborted": False}
    return SimpleNamespace(**given | fields, hints=None if params is None else as_params(params))


def remote(num_tokens: int = 32, **fields: Any) -> TransferParams:
    return TransferParams(do_remote_prefill=True, remote_workers=[address(0)], remote_num_tokens=num_tokens, **fields)


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
    ("params", "num_computed"),
    [
        (None, 0),
        (remote(), 32),
        (remote(), 28),  # fewer than `min_fetch_tokens`
        (remote(remote_engine_id="x", remote_lease="y", num_tokens=3), 0),
        (TransferParams(do_remote_prefill=True, remote_workers=["nonsense"], remote_num_tokens=32), 0),
        (TransferParams(do_remote_prefill=True, remote_workers=[address(0), address(1)], remote_num_tokens=32), 0),
        (TransferParams(do_remote_decode=True), 0),
    ],
)
def test_other_requests_read_nothing(params: TransferParams | None, num_computed: int):
    assert make().get_num_new_matched_tokens(request(params), num_computed) == (0, False)


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


def test_a_computed_prompt_is_kept_for_the_rank_that_goes_on():
    side = DisaggregationScheduler(setup(), DisaggregationSettings(lease_s=5))
    side.set_xfer_handshake_metadata({0: msgspec.msgpack.encode(WorkerInfo(address(0), 1000))})
    done = request(TransferParams(do_remote_decode=True), num_computed_tokens=34)
    keeps, params = side.request_finished(done, list(range(9)))
    assert keeps
    found = read_params(params)
    assert found is not None
    assert (found.remote_num_tokens, found.remote_workers, found.is_cheapest) == (32, [address(0)], True)
    note = told(side)
    assert note is not None
    assert note.leases == [Lease(found.remote_lease, 7, 5)]
    for other in (
        request(TransferParams(do_remote_decode=True), num_computed_tokens=34, is_aborted=True),
        request(TransferParams(do_remote_decode=True), num_computed_tokens=3),
        request(None, num_computed_tokens=34),
    ):
        assert side.request_finished(other, list(range(9))) == (False, None)


def test_blocks_are_kept_for_a_second_even_if_others_need_them(monkeypatch):
    now_s = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    side = DisaggregationScheduler(setup(), DisaggregationSettings(lease_s=5))
    for seq_id in (7, 8, 9):
        done = request(TransferParams(do_remote_decode=True), seq_id=seq_id, num_computed_tokens=34)
        assert side.request_finished(done, list(range(9)))[0]
        now_s[0] += 0.5
    side.update_connector_output(TransferResult([8], [], []))
    assert [side.give_up_send(), side.give_up_send()] == [7, None]
    now_s[0] += 1
    assert [side.give_up_send(), side.give_up_send()] == [9, None]


def test_params_with_other_types_are_named():
    with pytest.raises(ValueError, match="remote_num_tokens"):
        read_params({"do_remote_prefill": True, "remote_num_tokens": "many"})
    assert read_params({"anything": 1}) is None


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
