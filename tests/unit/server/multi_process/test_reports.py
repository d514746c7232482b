"""The status reports of an API server's process, without Ray."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import msgspec
import pytest
from waiting import LONG_S, eventually

from raycore import ray_api
from raycore.client.client import LinkView
from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.messages import NO_LOAD
from raycore.metrics.counts import RankCounts
from raycore.metrics.view import MetricsView
from raycore.server import ServerOptions
from raycore.server.http.counts import HttpCounts
from raycore.server.multi_process import api_server, api_servers
from raycore.server.multi_process.api_server import APIServer
from raycore.server.multi_process.driver_calls import READ_METRICS
from raycore.server.multi_process.reports import Report
from raycore.server.operations.metrics import Metrics


def decoded(reports: list[bytes]) -> list[Report]:
    return [msgspec.msgpack.decode(report, type=Report) for report in reports]


@pytest.fixture
def server(monkeypatch) -> APIServer:
    monkeypatch.setattr(api_server, "MAX_STREAMED", 2)
    config = resolve(demo_model_path(), load_format="dummy")
    return APIServer(config.encode(), 0, None, ServerOptions(("fake",)), {}, "server")


def test_a_stream_of_reports_continues_in_a_new_call_at_the_limit_of_one_call(server, monkeypatch):
    states = iter([Report(num_unfinished=1, broken=[(0, "gone")]), Report(2), Report(2), Report(), Report(3)])
    monkeypatch.setattr(server, "_report", lambda: next(states))
    monkeypatch.setattr(api_server, "_REPORT_S", 0.0)
    assert decoded(list(server.reports())) == [Report(num_unfinished=1, broken=[(0, "gone")]), Report(2)]
    assert decoded(list(server.reports())) == [Report(), Report(3)], "what hasn't changed isn't reported again"


def test_the_driver_calls_a_server_again_whose_call_reached_its_limit_of_reports(monkeypatch):
    """Ray keeps something for each report until the call ends."""
    sent = [Report(number) for number in range(5)]
    calls = [iter(sent[:2]), iter(sent[2:4]), iter(sent[4:])]
    begun = []

    def begin():
        begun.append(calls.pop(0))
        return begun[-1]

    actor = SimpleNamespace(reports=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=begin)))
    monkeypatch.setattr(ray_api, "MAX_STREAMED", 2)
    monkeypatch.setattr(api_servers, "wait", lambda refs, **_: (refs[:1], refs[1:]))
    monkeypatch.setattr(api_servers, "get", msgspec.msgpack.encode)
    process = api_servers._Process(actor, 0)  # type: ignore[arg-type]
    reports = (report for report in process.reports() if report is not None)
    assert [next(reports) for _ in sent] == sent
    assert len(begun) == 3
    with pytest.raises(api_servers._Ended, match="stopped sending"):
        next(reports)


def test_counts_are_reported_when_they_have_changed_and_with_many_ranks_more_rarely(server, monkeypatch):
    now_s, counts = [100.0], {rank: RankCounts.empty(100) for rank in range(3)}
    monkeypatch.setattr(api_server.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(server._client, "counts", lambda: {rank: each.copy() for rank, each in counts.items()})
    monkeypatch.setattr(server._client, "links", lambda: dict.fromkeys(range(3), LinkView(False, NO_LOAD)))
    monkeypatch.setattr(api_server, "_MAX_COUNTS_PER_S", 1)
    assert set(server._report().counts) == {0, 1, 2}
    counts[1].num_output_tokens = 7
    now_s[0] += 2.0
    assert server._report().counts == {}, "3 ranks at 1 a second"
    now_s[0] += 1.0
    assert server._report().counts == {1: counts[1]}
    counts[2].num_output_tokens = 9
    asking = threading.Thread(target=server._driver.call_and_wait, args=(READ_METRICS, LONG_S))
    asking.start()
    eventually(server._driver.has_unsent)
    report = server._report()
    server.finish_call(report.calls[0].number, None, None)
    asking.join()
    assert ([call.method for call in report.calls], report.counts) == ([READ_METRICS], {2: counts[2]})


def test_the_driver_keeps_the_counts_that_were_reported_before(monkeypatch):
    parts = [{0: counted(1)}, {}, {1: counted(2)}, {0: counted(3)}]
    items = iter([msgspec.msgpack.encode(Report(counts=part)) for part in parts])
    actor = SimpleNamespace(reports=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: items)))
    monkeypatch.setattr(api_servers, "wait", lambda refs, **_: (refs[:1], refs[1:]))
    monkeypatch.setattr(api_servers, "get", lambda ref: ref)
    process = api_servers._Process(actor, 0)  # type: ignore[arg-type]
    reports = (report for report in process.reports() if report is not None)
    seen: list[dict[int, int]] = []
    for _ in parts:
        next(reports)
        seen.append({rank: each.num_output_tokens for rank, each in process.counts().items()})
    assert seen == [{0: 1}, {0: 1}, {0: 1, 1: 2}, {0: 3, 1: 2}]


def counted(num_output_tokens: int) -> RankCounts:
    counts = RankCounts.empty(100)
    counts.num_output_tokens = num_output_tokens
    return counts


def test_a_servers_metrics_are_those_that_the_driver_answers_with(server):
    view, http = MetricsView([], {0: counted(5)}, [], 2), HttpCounts()
    http.add("GET", "2xx", "/v1/models", 0.1)

    def answer() -> None:
        eventually(server._driver.has_unsent)
        (call,) = server._driver.take()
        server.finish_call(call.number, (view, http), None)

    thread = threading.Thread(target=answer)
    thread.start()
    assert server._engine.read_metrics() is view
    thread.join()
    assert server._app.state.service.own(Metrics).all_http_counts is http


def test_many_answers_of_a_server_are_taken_together(monkeypatch):
    """It is told of each rank when it starts."""
    actor = SimpleNamespace(
        reports=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: "reports")),
        on_rank_event=SimpleNamespace(remote=lambda event: f"told of {event}"),
    )
    process = api_servers._Process(actor, 0)  # type: ignore[arg-type]
    for dp_rank in range(100):
        process.on_rank_event(dp_rank)  # type: ignore[arg-type]
    asked: list[int] = []

    def wait(refs, num_returns, timeout_s):
        asked.append(len(refs))
        done = [ref for ref in refs if ref != "reports"][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    monkeypatch.setattr(api_servers, "wait", wait)
    monkeypatch.setattr(api_servers, "get", lambda ref: None)
    reports = process.reports()
    for _ in range(3):
        assert next(reports) is None
    assert asked == [101, 101, 1, 1]
