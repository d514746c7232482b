"""How far a start is, as those see it who wait for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_runtime import PENDING

from raycore.cluster import engine_start
from raycore.cluster.engine_start import EngineStart, StartView
from raycore.errors import InitializationError


def test_a_start_goes_through_its_phases():
    now_s = 100.0
    manager: Any = SimpleNamespace(node="", ranks={}, infos=[])
    shown: list[float] = []
    start = EngineStart(clock_s=lambda: now_s)
    assert str(start.view()) == "reading the checkpoint's configuration, 0 s so far"
    assert start.view().num_ranks is None
    note = start.watch(manager, 2, shown.append)
    now_s += 12.4
    assert str(start.view()) == "connecting to Ray, 0 of 2 ranks ready, 12 s so far"
    manager.node = "a"
    assert start.view().phase == engine_start.PLACING
    manager.ranks = {0: object(), 1: object()}
    assert start.view().phase == engine_start.STARTING_RANKS
    note(0.4347)
    manager.infos = [object()]
    assert str(start.view()) == "loading weights (43%), 1 of 2 ranks ready, 12 s so far"
    assert start.view().as_dict() == {
        "phase": "loading weights",
        "elapsed_s": 12.4,
        "num_ranks": 2,
        "num_ready": 1,
        "weights_read": 0.435,
    }
    note(1.0)
    assert start.view().phase == engine_start.WARMING_UP
    manager.infos = [object(), object()]
    assert start.view().phase == engine_start.STARTING_SERVER
    assert shown == [0.4347, 1.0]


def test_the_ranks_of_a_manager_that_starts_are_seen(make):
    engine = make(num_ranks=2)
    engine.runtime.answers["wait_for_init"] = lambda actor, *_: PENDING
    start = EngineStart(clock_s=engine.clock.now_s)
    seen: list[StartView] = []
    note = start.watch(engine.manager, 2, lambda share: seen.append(start.view()))
    assert start.view().phase == engine_start.CONNECTING
    with pytest.raises(InitializationError):
        engine.manager.start(note, lambda: engine.clock.now_s() < 1.0)
    assert {(view.phase, view.num_ranks, view.num_ready) for view in seen} == {(engine_start.LOADING, 2, 0)}
