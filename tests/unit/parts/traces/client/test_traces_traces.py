"""An engine without traces asks for nothing: no timings, no watchers, no spans."""

from __future__ import annotations

from unittest.mock import Mock

from raycore.messages import EngineInfo
from raycore.parts.traces.client.traces import NO_TRACES


def test_without_traces_an_engine_is_not_watched():
    engine = Mock()
    NO_TRACES.watch(engine, "m")
    assert engine.mock_calls == []


def test_the_starts_of_ranks_are_told_without_effect():
    info = EngineInfo(0, 1, "node", 1, 16, 64, "float32", {}, [1])
    NO_TRACES.engine_started(0.0, [info])
    NO_TRACES.rank_up(info)
    NO_TRACES.stop()
    assert not NO_TRACES.is_on
