"""How a replica of Ray Serve comes to its application. Serve itself doesn't run."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable

import pytest
from fastapi import FastAPI
from ray import serve

from raycore.server.serve_app import late_ingress


class Replica:
    async def __init__(self, title: str) -> None:
        self._title = title

    def __serve_build_asgi_app__(self) -> FastAPI:
        return FastAPI(title=self._title)


# Serve awaits it, the garbage collector doesn't
@pytest.mark.filterwarnings("ignore:coroutine '.*__del__' was never awaited:RuntimeWarning")
def test_a_replica_serves_the_app_it_builds_if_ray_serve_needs_an_app_beforehand(monkeypatch):
    ingress: Callable[..., Callable[..., type]] = serve.ingress
    monkeypatch.setattr(serve, "ingress", lambda app: ingress(app))  # as in Ray 2.55
    deployed = late_ingress(Replica)

    async def start() -> FastAPI:
        replica = deployed.__new__(deployed)
        await replica.__init__("built after the start")
        return replica.app

    assert asyncio.run(start()).title == "built after the start"


@pytest.mark.skipif(
    inspect.signature(serve.ingress).parameters["app"].default is not None, reason="this Serve needs the application"
)
def test_no_app_is_passed_to_a_ray_serve_that_asks_the_replica_for_one(monkeypatch):
    ingress = serve.ingress
    given = []
    monkeypatch.setattr(serve, "ingress", lambda app=None: given.append(app) or ingress(app))
    late_ingress(Replica)
    assert given == [None]
