"""How a replica of Ray Serve comes to its application. Serve itself doesn't run."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable

import pytest
from fastapi import FastAPI
from ray import serve

from placement.topology import ClusterView, NodeView
from raycore.errors import InvalidConfig
from raycore.serve import build_openai_app
from raycore.serve.llm_server import RaycoreServer
from raycore.server import serve_app
from raycore.server.serve_app import build_serve_app, check_model_path, late_ingress


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


def cluster_of(monkeypatch: pytest.MonkeyPatch, *alive: bool) -> None:
    """Let this process be connected to a cluster with these nodes."""
    nodes = tuple(NodeView(str(index), "10.0.0.1", {}, {}, alive=each) for index, each in enumerate(alive))
    monkeypatch.setattr(serve_app, "is_connected", lambda: True)
    monkeypatch.setattr(serve_app, "read_cluster", lambda: ClusterView(nodes))


def build_model(**loading: str) -> object:
    return build_openai_app({"llm_configs": [{"model_loading_config": {"model_id": "sums", **loading}}]})


class Config:
    """In the place of Ray's `LLMConfig`."""

    def model_dump(self, exclude_unset: bool) -> dict[str, object]:
        return {"model_loading_config": {"model_id": "/nowhere"}}


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: build_model(model_source="/nowhere"), "llm_configs[0]: model_source"),
        (lambda: build_model(model_source="org/name", tokenizer_source="/nowhere"), "llm_configs[0]: tokenizer_source"),
        (lambda: build_model(model_id="/nowhere"), "llm_configs[0]: model_id"),
        (lambda: build_serve_app({"model": "/nowhere"}), "model"),
        (lambda: RaycoreServer.get_deployment_options(Config()), "LLMConfig: model_id"),
    ],
)
def test_an_app_of_a_path_that_does_not_exist_is_refused_before_replicas_start(monkeypatch, build, name):
    cluster_of(monkeypatch, True, False)
    with pytest.raises(InvalidConfig, match="^" + re.escape(f"{name}='/nowhere' doesn't exist: give the directory")):
        build()


def test_a_path_may_be_on_other_nodes_only(monkeypatch, caplog):
    cluster_of(monkeypatch, True, True)
    check_model_path("model", "./nowhere")
    monkeypatch.setattr(serve_app, "is_connected", lambda: False)
    check_model_path("model", "~/nowhere")
    assert [record.getMessage() for record in caplog.records] == [
        "model='./nowhere' doesn't exist on this machine: it has to on the nodes of the replicas",
        "model='~/nowhere' doesn't exist on this machine: it has to on the nodes of the replicas",
    ]


@pytest.mark.parametrize("path", ["org/name", None, {"bucket_uri": "s3://b"}, "."])
def test_only_paths_are_looked_for(monkeypatch, caplog, path):
    cluster_of(monkeypatch, True)
    check_model_path("model", path)
    assert caplog.records == []
