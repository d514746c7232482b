"""The dashboard asks only for what `/metrics` has, and has nowhere two panels in one place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from fastapi.testclient import TestClient
from metric_views import make_view
from prometheus_client.parser import text_string_to_metric_families

from raycore.server import ServerOptions, build_app

DASHBOARD = json.loads((Path(__file__).parents[4] / "docs/grafana/raycore.json").read_text())
METRIC = re.compile(r"\b(?:vllm:|raycore_|http_)\w+")
SELECTOR = re.compile(r"((?:vllm:|raycore_|http_)\w+)\{([^}]*)\}")


def expressions() -> list[str]:
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return asked + [each["definition"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    """The labels of each sample that there is, by name."""
    client = TestClient(build_app(FakeEngine(metrics=make_view()), ServerOptions(("m",))))
    client.get("/v1/models")
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_every_metric_and_label_of_the_dashboard_exists(samples):
    used = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(used) > 15
    assert used - set(samples) == set()
    for expression in expressions():
        for name, selector in SELECTOR.findall(expression):
            assert set(re.findall(r"(\w+)=~", selector)) <= samples[name], expression


def test_every_label_that_the_dashboard_groups_by_exists(samples):
    for expression in expressions():
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            for name in METRIC.findall(expression):
                assert set(labels.split(", ")) <= samples[name], expression


def test_panels_of_the_dashboard_do_not_overlap():
    places = [
        (x, y)
        for position in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
