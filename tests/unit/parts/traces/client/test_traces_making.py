"""Whether there are traces follows from the option, and an end doesn't wait for a collector that is gone."""

from __future__ import annotations

import socket
import time

import pytest

from raycore.parts.traces.client import spans as spans_module
from raycore.parts.traces.client.making import make_traces
from raycore.parts.traces.client.traces import NO_TRACES
from raycore.parts.traces.config import TracesConfig


def test_without_an_endpoint_there_are_no_traces():
    assert make_traces(TracesConfig()) is NO_TRACES


@pytest.mark.parametrize("path", ["", "/v1/traces"])
def test_the_end_does_not_wait_for_a_collector_that_is_gone(monkeypatch, caplog, path):
    monkeypatch.setattr(spans_module, "FLUSH_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        traces = make_traces(TracesConfig(f"http://127.0.0.1:{silent.getsockname()[1]}{path}"))
        assert traces.is_on
        traces.engine_started(time.time(), [])
        begun_s = time.monotonic()
        traces.stop()
        traces.stop()
        assert time.monotonic() - begun_s < 20
    assert "the last traces are lost" in caplog.text
    traces._stopper.join(60.0)  # it logs that the connection is lost
