"""A rank's state, without an engine."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from raycore.activity import RUNNING, Activity
from raycore.client.client import LinkView
from raycore.cluster.rank import HeldWeights
from raycore.cluster.supervisor import WatchView
from raycore.control.ranks import rank_state, rank_statuses
from raycore.messages import NO_LOAD, Computation, EngineInfo, KVFetches, LoadView
from raycore.status import RankStatus

SERVES = LinkView(is_leaving=False, load=NO_LOAD)
LEAVES = LinkView(is_leaving=True, load=NO_LOAD)
WATCHED = WatchView(num_restarts=0, has_given_up=False)
HOMELESS = WatchView(num_restarts=0, has_given_up=False, shortage="each rank needs 1 worker of CPU 1")
GIVEN_UP = WatchView(num_restarts=5, has_given_up=True)


@pytest.mark.parametrize(
    ("link", "watch", "is_up", "state"),
    [
        (None, None, False, "starting"),
        (SERVES, None, True, "serving"),
        (SERVES, WATCHED, True, "serving"),
        (None, WATCHED, True, "restarting"),  # it has died; nothing has taken its place
        (None, WATCHED, False, "restarting"),  # its successor is on its way
        (None, HOMELESS, True, "unplaced"),
        (None, GIVEN_UP, True, "gone"),
        (SERVES, GIVEN_UP, True, "gone"),  # the engine has failed
        (LEAVES, WATCHED, True, "leaving"),  # its node is drained
        (LEAVES, None, True, "leaving"),
        (None, None, True, "leaving"),  # its requests are done; it is being stopped
    ],
)
def test_the_state_of_a_rank_follows_from_its_link_and_watch(
    link: LinkView | None, watch: WatchView | None, is_up: bool, state: str
) -> None:
    assert rank_state(link, watch, RUNNING, is_up=is_up) == state


@pytest.mark.parametrize(
    ("activity", "state"), [(RUNNING.paused(), "paused"), (RUNNING.put_to_sleep(1), "asleep"), (RUNNING, "serving")]
)
def test_a_serving_rank_has_the_state_of_the_engines_activity(activity: Activity, state: str) -> None:
    assert rank_state(SERVES, WATCHED, activity, is_up=True) == state
    assert rank_state(LEAVES, WATCHED, activity, is_up=True) == "leaving"
    assert rank_state(None, WATCHED, activity, is_up=True) == "restarting"


def test_a_status_has_what_its_rank_last_reported_and_can_be_written_as_json() -> None:
    load = LoadView(3, 2, 0.25, num_deferred=1, kv_fetches=KVFetches(in_progress=1))
    (status,) = statuses(None, load)
    shown = json.loads(json.dumps(dataclasses.asdict(status)))
    assert (shown["num_waiting"], shown["num_running"], shown["num_deferred"]) == (3, 2, 1)
    assert shown["kv_fetches"] == {"waiting_to_start": 0, "in_progress": 1, "completed_waiting": 0}


def test_a_status_has_the_bytes_that_the_last_decode_steps_read_in_a_second() -> None:
    workers = [Computation("native (avx2)", step_bytes=size, memory_rate=15e9) for size in (300_000_000, 100_000_000)]
    info = EngineInfo(0, 1, "node", 1, 16, 64, "float32", {}, [1, 2], computations=workers)
    assert [status.decode_rate for status in statuses(info, NO_LOAD)] == [0.0]
    (status,) = statuses(info, LoadView(0, 0, 0.0, decode_s=0.02))
    assert (status.decode_rate, status.memory_rate) == (20e9, 30e9)
    (status,) = statuses(info, LoadView(0, 0, 0.0, decode_s=0.01))
    assert (status.decode_rate, status.memory_rate) == (40e9, 40e9)  # while it was measured, the cores were busy
    unknown = msgspec.structs.replace(info, computations=[workers[0], Computation("native (avx2)")])
    assert statuses(unknown, LoadView(0, 0, 0.0, decode_s=0.02))[0].decode_rate == 0.0


def test_a_rank_without_room_is_on_no_node_and_says_what_it_needs() -> None:
    info = EngineInfo(0, 1, "node", 1, 16, 64, "float32", {}, [1, 2])
    (status,) = statuses(info, None, HOMELESS)
    assert (status.state, status.node_ids, status.pid) == ("unplaced", [], None)
    assert status.shortage == HOMELESS.shortage


def statuses(info: EngineInfo | None, load: LoadView | None, watch: WatchView = WATCHED) -> list[RankStatus]:
    """`load`: None: no client has a link to the rank."""
    parts: list[Any] = [
        SimpleNamespace(
            ranks={0: SimpleNamespace(info=info, nodes=["a", "a"], weights=HeldWeights())},
            desired=SimpleNamespace(now=SimpleNamespace(activity=RUNNING)),
        ),
        SimpleNamespace(watches=lambda: {0: watch}),
        SimpleNamespace(links=lambda: {} if load is None else {0: LinkView(is_leaving=False, load=load)}),
    ]
    return rank_statuses(*parts)


def test_a_rank_of_an_engine_that_has_failed_has_no_requests() -> None:
    load = LoadView(num_waiting=2, num_running=3, kv_usage=0.5)
    (status,) = statuses(None, load, GIVEN_UP)
    assert (status.state, status.num_running, status.num_waiting, status.kv_usage) == ("gone", 0, 0, 0.0)


def test_a_rank_without_weights_to_serve_with_is_stale_while_it_is_up() -> None:
    assert rank_state(None, WATCHED, RUNNING, is_up=True, is_stale=True) == "stale"
    assert rank_state(None, WATCHED, RUNNING, is_up=False, is_stale=False) == "restarting"
    assert rank_state(LEAVES, WATCHED, RUNNING, is_up=True, is_stale=True) == "leaving"
    assert rank_state(None, GIVEN_UP, RUNNING, is_up=True, is_stale=True) == "gone"
