"""What one program's clients hear of ranks, and what it knows of them all, with clients that only take notes."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
from waiting import LONG_S

from raycore.client.client import LinkView
from raycore.client.group import ClientGroup, RankReply
from raycore.engine.rank_events import EngineLost, LossExplained, RankEvent, RanksLost, RankUp
from raycore.errors import EngineDeadError
from raycore.messages import NO_LOAD, EngineInfo, LoadView
from raycore.metrics.counts import RankCounts

DEAD = EngineDeadError("killed")


def info(dp_rank: int) -> EngineInfo:
    return EngineInfo(dp_rank, 1, "node", 8, 16, 128, "float32", {}, [])


def counts(output: int, preemptions: int = 0) -> RankCounts:
    made = RankCounts.empty(128)
    made.num_output_tokens, made.num_preemptions = output, preemptions
    made.num_finished["stop"] = output
    made.output_tokens.observe(output)
    return made


class Own:
    """In the place of the program's own client."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.forgotten: list[int] = []
        self.loads: dict[int, LoadView] = {0: NO_LOAD, 1: NO_LOAD}
        self.num_unfinished_requests = 0
        self.busy: set[int] = set()

    def on_rank_event(self, event: RankEvent) -> None:
        self.heard.append(event)

    def ranks_leaving(self, dp_ranks: Any, timeout_s: float, come_back: bool = False) -> None:
        self.heard.append(("leaving for now" if come_back else "leaving", *dp_ranks))

    def is_busy(self, dp_rank: int) -> bool:
        return dp_rank in self.busy

    def drain(self, timeout_s: float) -> bool:
        return True

    def abort_all(self) -> None:
        self.heard.append(("abort all",))

    def forget_images(self) -> None:
        self.heard.append(("forget images",))

    def abort_groups(self, request_ids: Any) -> int:
        self.heard.append(("abort", request_ids))
        return 3

    def pause_new(self) -> None:
        self.heard.append(("pause_new",))

    def wait_for_older(self) -> bool:
        return True

    def complete_pause(self, sent: Any, aborts: bool, timeout_s: float) -> bool:
        self.heard.append(("complete", sent, aborts))
        return True

    def resume_new(self) -> None:
        self.heard.append(("resume_new",))

    def links(self) -> dict[int, LinkView]:
        return {dp_rank: LinkView(False, load) for dp_rank, load in self.loads.items()}

    def counts(self) -> dict[int, RankCounts]:
        return {0: counts(output=1, preemptions=2), 1: counts(output=10)}

    def forget_client(self, client_index: int) -> None:
        self.forgotten.append(client_index)


class Remote:
    """In the place of another process's client."""

    def __init__(self, client_index: int) -> None:
        self.client_index = client_index
        self.heard: list[Any] = []
        self.loads: dict[int, LoadView] = {}
        self.num_unfinished_requests = 0
        self.answer: Future[Any] = Future()

    def on_rank_event(self, event: RankEvent) -> None:
        self.heard.append(event)

    def ranks_leaving(self, dp_ranks: Any, timeout_s: float, come_back: bool = False) -> Future[Any]:
        self.heard.append(("leaving for now" if come_back else "leaving", *dp_ranks))
        return self.answer

    def drain(self, timeout_s: float) -> Future[bool]:
        self.heard.append(("drain",))
        return self.answer

    def abort_all(self) -> None:
        self.heard.append(("abort all",))

    def forget_images(self) -> Future[Any]:
        self.heard.append(("forget images",))
        return self.answer

    def abort_requests(self, request_ids: Any) -> Future[Any]:
        self.heard.append(("abort", request_ids))
        return self.answer

    def pause_new(self) -> Future[Any]:
        self.heard.append(("pause_new",))
        return self.answer

    def wait_for_older(self) -> Future[Any]:
        return self.answer

    def complete_pause(self, sent: Any, aborts: bool, timeout_s: float) -> Future[Any]:
        self.heard.append(("complete", sent, aborts))
        return self.answer

    def resume_new(self) -> None:
        self.heard.append(("resume_new",))

    def counts(self) -> dict[int, RankCounts]:
        return {0: counts(output=100, preemptions=2)}

    def num_own(self, dp_rank: int) -> int:
        return int(dp_rank in self.loads)

    def load(self, dp_rank: int) -> LoadView:
        return self.loads.get(dp_rank, NO_LOAD)


@pytest.fixture
def own() -> Own:
    return Own()


@pytest.fixture
def group(own: Own) -> ClientGroup:
    return ClientGroup(own)  # pyright: ignore[reportArgumentType]


def up(dp_rank: int, actor: str = "actor") -> RankUp:
    return RankUp(dp_rank, actor, info(dp_rank))


def test_a_client_that_joins_late_is_told_the_ranks_in_service(group: ClientGroup) -> None:
    for dp_rank in range(4):
        group.on_rank_event(up(dp_rank))
    group.on_rank_event(RanksLost([1], 1))
    group.ranks_leaving([2], 0.0)
    group.ranks_leaving([3], 0.0, come_back=True)
    late = Remote(1)
    group.join(late)
    assert late.heard == [RanksLost([1, 3], 0), up(0)], "requests may name ranks that come back"
    group.on_rank_event(up(1, "another"))
    assert late.heard[2:] == [up(1, "another")]
    group.on_rank_event(up(3))
    later = Remote(2)
    group.join(later)
    assert later.heard == [up(0), up(1, "another"), up(3)]


def test_all_clients_get_the_same_rank_events_in_the_same_order(group: ClientGroup, own: Own) -> None:
    remote = Remote(1)
    group.join(remote)
    events = [up(0), up(1), RanksLost([0, 1], 1), LossExplained(1, DEAD), up(0), EngineLost(DEAD)]
    for event in events:
        group.on_rank_event(event)
    assert remote.heard == own.heard == events


def test_ranks_leaving_waits_until_no_client_needs_the_ranks(group: ClientGroup, own: Own) -> None:
    remote = Remote(1)
    group.join(remote)
    leaving = threading.Thread(target=group.ranks_leaving, args=([0], 60.0, True))
    leaving.start()
    leaving.join(0.1)
    assert leaving.is_alive()
    remote.answer.set_result(None)
    leaving.join(LONG_S)
    assert not leaving.is_alive()
    assert remote.heard == own.heard == [("leaving for now", 0)]


def test_a_dead_client_delays_neither_leaving_ranks_nor_a_drain(group: ClientGroup) -> None:
    remote = Remote(1)
    group.join(remote)
    remote.answer.set_exception(RuntimeError("its process is gone"))
    group.ranks_leaving([0], 60.0)
    assert group.drain(60.0) is False


@pytest.mark.parametrize("request_ids", [["a", "b"], None])
def test_requests_of_all_clients_are_aborted_and_counted(group: ClientGroup, own: Own, request_ids: Any) -> None:
    remote, dead = Remote(1), Remote(2)
    group.join(remote)
    group.join(dead)
    remote.answer.set_result(4)
    dead.answer.set_exception(RuntimeError("its process is gone"))
    assert group.abort_requests(request_ids) == 3 + 4
    assert own.heard == remote.heard == dead.heard == [("abort", request_ids)]


def test_all_clients_forget_images_though_one_is_gone(group: ClientGroup, own: Own) -> None:
    remote, dead = Remote(1), Remote(2)
    group.join(remote)
    group.join(dead)
    remote.answer.set_result(None)
    dead.answer.set_exception(RuntimeError("its process is gone"))
    group.forget_images()
    assert own.heard == remote.heard == dead.heard == [("forget images",)]


def test_a_client_that_joins_a_draining_engine_drains_too(group: ClientGroup) -> None:
    assert group.drain(1.0)
    late = Remote(1)
    group.join(late)
    assert late.heard == [("drain",)]


def test_a_client_that_joins_a_paused_engine_pauses_its_requests(group: ClientGroup) -> None:
    group.pause_new()
    late, later = Remote(1), Remote(2)
    group.join(late)
    assert late.heard == [("pause_new",)]
    group.resume_new()
    assert late.heard[1:] == [("resume_new",)]
    group.join(later)
    assert later.heard == []


@pytest.mark.parametrize("answer", [True, False, RuntimeError("its process is gone")])
def test_a_pause_is_complete_when_all_clients_have_received_their_outputs(
    group: ClientGroup, own: Own, answer: bool | Exception
) -> None:
    remote = Remote(3)
    group.join(remote)
    if isinstance(answer, Exception):
        remote.answer.set_exception(answer)
    else:
        remote.answer.set_result(answer)
    group.pause_new()
    is_good = answer is not False  # a process that is gone has no requests any more
    assert group.wait_for_older() == is_good
    assert group.complete_pause({0: RankReply(7, {0: 5, 3: 6}), 1: RankReply(8, {})}, True, 60.0) == is_good
    assert own.heard == [("pause_new",), ("complete", {0: (7, 5), 1: (8, 0)}, True)]
    assert remote.heard == [("pause_new",), ("complete", {0: (7, 6), 1: (8, 0)}, True)]


def test_a_client_that_joins_a_lost_engine_is_told_the_cause(group: ClientGroup) -> None:
    group.on_rank_event(EngineLost(DEAD))
    late = Remote(1)
    group.join(late)
    assert late.heard == [EngineLost(DEAD)]


def test_the_ranks_are_told_to_forget_a_client_that_leaves(group: ClientGroup, own: Own) -> None:
    remote = Remote(7)
    group.join(remote)
    remote.num_unfinished_requests = 3
    assert group.num_unfinished_requests == 3
    group.leave(remote)
    group.leave(remote)
    assert set(own.forgotten) == {7}
    assert group.num_unfinished_requests == 0
    group.on_rank_event(up(0))
    assert remote.heard == []


def test_a_rank_is_busy_if_any_client_has_a_request_on_it(group: ClientGroup, own: Own) -> None:
    remote = Remote(1)
    group.join(remote)
    assert [group.is_busy(dp_rank) for dp_rank in (0, 1)] == [False, False]
    own.busy, remote.loads = {0}, {1: LoadView(0, 1, 0.1)}
    assert [group.is_busy(dp_rank) for dp_rank in (0, 1)] == [True, True]


def test_a_ranks_load_is_the_largest_that_any_client_knows(group: ClientGroup, own: Own) -> None:
    first, second = Remote(1), Remote(2)
    group.join(first)
    group.join(second)
    first.loads = {0: LoadView(2, 8, 0.5)}
    second.loads = {0: LoadView(0, 7, 0.4)}
    own.loads = {0: NO_LOAD, 1: LoadView(0, 1, 0.1)}
    assert {dp_rank: link.load for dp_rank, link in group.links().items()} == {
        0: LoadView(2, 8, 0.5),
        1: LoadView(0, 1, 0.1),
    }


def test_counts_sum_over_all_clients_including_those_that_left(group: ClientGroup) -> None:
    remote = Remote(1)
    group.join(remote)
    for _ in range(2):
        found = group.counts()
        assert {dp_rank: each.num_output_tokens for dp_rank, each in found.items()} == {0: 101, 1: 10}
        assert found[0].num_preemptions == 2, "the rank's own, which every client hears of"
        assert found[0].num_finished["stop"] == 101
        assert (found[0].output_tokens.count, found[0].output_tokens.sum) == (2, 101)
        group.leave(remote)
