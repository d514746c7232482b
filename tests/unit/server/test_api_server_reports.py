"""The status reports of an API server's process, without Ray."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from raycore import ray_api
from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.server import ServerOptions
from raycore.server.multi_process import api_server, api_servers
from raycore.server.multi_process.api_server import APIServer
from raycore.server.multi_process.reports import Report


def decoded(reports: list[bytes]) -> list[Report]:
    return [msgspec.msgpack.decode(report, type=Report) for report in reports]


@pytest.fixture
def server(monkeypatch) -> APIServer:
    monkeypatch.setattr(api_server, "MAX_STREAMED", 2)
    config = resolve(demo_model_path(), load_format="dummy")
    return APIServer(config.encode(), 0, None, ServerOptions(("fake",)), None, "server")


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
