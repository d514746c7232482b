"""`GET /fault_tolerance/status` tells how each rank is."""

from __future__ import annotations

from typing import get_args

from asgi_client import Client
from fake_engine import FakeEngine
from metric_views import make_view

from raycore.metrics.view import MetricsView
from raycore.server import ServerOptions, build_app
from raycore.status import RankState, RankStatus

EXPECTED = {
    "starting": "unhealthy",
    "serving": "healthy",
    "paused": "paused",
    "asleep": "paused",
    "stale": "unhealthy",
    "restarting": "unhealthy",
    "unplaced": "unhealthy",
    "leaving": "healthy",
    "gone": "dead",
}


def test_each_state_of_a_rank_has_a_word_of_vllms():
    assert list(EXPECTED) == list(get_args(RankState))
    ranks = [RankStatus(dp_rank, state, []) for dp_rank, state in enumerate(get_args(RankState))]
    metrics = MetricsView(ranks, {}, [], 0)
    answer = Client(build_app(FakeEngine(metrics=metrics), ServerOptions(("fake",)))).get("/fault_tolerance/status")
    engines = [{"id": dp_rank, "status": status} for dp_rank, status in enumerate(EXPECTED.values())]
    assert (answer.status, answer.json) == (200, {"total_engines": len(EXPECTED), "engines": engines})


def test_it_needs_the_servers_key():
    app = build_app(FakeEngine(metrics=make_view()), ServerOptions(("fake",), api_keys=("secret",)))
    assert Client(app).get("/fault_tolerance/status").status == 401
    assert Client(app, {"x-api-key": "secret"}).get("/fault_tolerance/status").json["total_engines"] == 1
