"""How the benchmark of dashboards reads Grafana's files, and what it says of expressions without samples."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from dashboard_panels import Panel, panels_of, plain, why_empty


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ('rate(a_total{m="$model"}[$__rate_interval])', 'rate(a_total{m=~".*"}[15s])'),
        ('a{m=~"${model:regex}", j!="x"}', 'a{m=~".*", j!="x"}'),
        ("increase(a[${__range}]) + rate(a[$window])", "increase(a[15s]) + rate(a[15s])"),
        ("histogram_quantile($quantile, a)", "histogram_quantile(0.9, a)"),
        ('sum by (le) (a{m="fixed"})', 'sum by (le) (a{m="fixed"})'),
    ],
)
def test_an_expression_gets_values_for_grafanas_variables(expression, expected):
    assert plain(expression) == expected


def test_the_expressions_of_panels_in_rows_count_too(tmp_path: Path):
    inner = {"title": "inner", "targets": [{"expr": "b"}, {"expr": ""}, {}]}
    row = {"title": "row", "type": "row", "panels": [inner]}
    panels = [{"title": "outer", "targets": [{"expr": "a"}]}, {"type": "text"}, row]
    for document in ({"panels": panels}, {"dashboard": {"panels": panels}}):
        path = tmp_path / "d.json"
        path.write_text(json.dumps(document))
        assert list(panels_of(path)) == [Panel("d.json", "outer", "a"), Panel("d.json", "inner", "b")]


def test_an_expression_without_samples_says_which_metric_is_missing():
    def answer(request: httpx.Request) -> httpx.Response:
        query = request.url.params["query"]
        if query == "(":
            return httpx.Response(400, json={"status": "error", "error": "parse error"})
        result = [{}] if query == "up_total" else []
        return httpx.Response(200, json={"status": "success", "data": {"resultType": "vector", "result": result}})

    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://prometheus")
    known = {"up_total", "vllm:known_total"}
    reasons = {
        query: why_empty(client, Panel("d", "t", query), known)
        for query in ("up_total", "rate(vllm:lost_total[15s])", 'vllm:known_total{a="b"}', "(")
    }
    assert list(reasons.values()) == [
        None,
        "no metric vllm:lost_total",
        "no samples with these labels",
        "Prometheus refuses it: parse error",
    ]
