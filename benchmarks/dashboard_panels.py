"""Says which panels of Grafana dashboards stay empty for a server of raycore, and why.

A server of the bundled model runs requests while a Prometheus scrapes it. Each expression of each panel is then
evaluated by Prometheus. Dashboards aren't part of raycore: give those that other servers' projects publish.

    python benchmarks/dashboard_panels.py --dashboards DASHBOARD.json ... --prometheus /usr/bin/prometheus
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from common import table
from openai_scenarios import Api
from openai_scenarios.table import PROMPT
from openai_servers import MAX_MODEL_LEN, raycore_server

from raycore import AsyncLLM
from raycore.demo import demo_model_path

SCRAPE_S = 3
LOAD_S = 25.0
START_TIMEOUT_S = 30.0
WINDOW = "15s"
_MATCHER = re.compile(r'(=~|!~|!=|=)\s*"(\$\w+|\$\{\w+[^}]*\})"')
_METRIC = re.compile(r"[a-zA-Z_:][\w:]*(?=\s*[\[{)]|\s*$|\s*[-+*/<>=])")


@dataclass(frozen=True)
class Panel:
    """One expression of a panel."""

    dashboard: str
    title: str
    expression: str


def panels_of(path: Path) -> Iterator[Panel]:
    """All expressions of a dashboard, also of panels in rows, with values for Grafana's variables."""

    def walk(panels: Sequence[dict[str, Any]]) -> Iterator[Panel]:
        for panel in panels:
            for target in panel.get("targets") or ():
                if target.get("expr"):
                    yield Panel(path.name, panel.get("title") or "(no title)", plain(target["expr"]))
            yield from walk(panel.get("panels") or ())

    document = json.loads(path.read_text())
    yield from walk(document.get("dashboard", document)["panels"])


def plain(expression: str) -> str:
    """An expression without Grafana's variables. A label that one chooses may have any value."""
    for name in ("__rate_interval", "__range", "__interval"):
        expression = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", WINDOW, expression)
    expression = _MATCHER.sub(lambda found: '=~".*"' if found[1] in ("=", "=~") else '!=""', expression)
    # a variable elsewhere is mostly a quantile or a window
    return re.sub(
        r"\[\$\{?\w+\}?\]", f"[{WINDOW}]", re.sub(r"\$\{?\w*(?:quantile|percentile)\w*\}?", "0.9", expression)
    )


@contextmanager
def prometheus(program: str, target: str) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes `target`, as a client of its API."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [{"job_name": "raycore", "static_configs": [{"targets": [target]}]}]
        config = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": jobs}
        Path(folder, "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        port = _free_port()
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                _wait_until(lambda: client.get("/-/ready").status_code == 200, process, "ready")
                _wait_until(lambda: _is_scraping(client), process, "scraping")
                yield client
        finally:
            process.terminate()
            process.wait(30)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _is_scraping(client: httpx.Client) -> bool:
    targets = client.get("/api/v1/targets").json()["data"]["activeTargets"]
    return [each["health"] for each in targets] == ["up"]


def _wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with suppress(httpx.TransportError):
            if is_so():
                return
        time.sleep(0.2)
    raise RuntimeError(f"Prometheus wasn't {what} within {START_TIMEOUT_S:g} s")


def send_load(api: Api) -> None:
    """Run requests of all kinds for `LOAD_S` seconds."""
    deadline_s = time.monotonic() + LOAD_S
    asks = (
        lambda: api.complete(n=2, temperature=1, max_tokens=40, ignore_eos=True),
        lambda: list(api.complete([PROMPT, PROMPT + " 85"], stream=True)),
        lambda: api.chat(max_tokens=30, ignore_eos=True),
        lambda: api.http.get("/v1/models/other"),
    )

    def work(ask: Any) -> None:
        while time.monotonic() < deadline_s:
            ask()

    with ThreadPoolExecutor(len(asks)) as pool:
        list(pool.map(work, asks))
    for path in ("/sleep?level=0", "/wake_up"):
        api.http.post(path)


def why_empty(client: httpx.Client, panel: Panel, known: set[str]) -> str | None:
    """Why Prometheus has no samples for a panel's expression; None if it has some."""
    answer = client.get("/api/v1/query", params={"query": panel.expression}).json()
    if answer["status"] != "success":
        return f"Prometheus refuses it: {answer['error']}"
    result = answer["data"]["result"]
    if answer["data"]["resultType"] == "scalar" or result:
        return None
    asked = re.sub(r"\{[^}]*\}|\bby\s*\([^)]*\)", "", panel.expression)
    missing = sorted({name for name in _METRIC.findall(asked) if ":" in name or "_" in name} - known)
    return f"no metric {', '.join(missing)}" if missing else "no samples with these labels"


def main() -> int:
    """Print the empty panels. The exit status is 1 if Prometheus refuses an expression."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dashboards", type=Path, nargs="+", required=True, metavar="FILE", help="Grafana's JSON")
    parser.add_argument("--prometheus", required=True, metavar="PATH", help="the program")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="the engine's options")
    args = parser.parse_args()
    panels = [panel for path in args.dashboards for panel in panels_of(path)]
    engine = AsyncLLM(demo_model_path(), max_model_len=MAX_MODEL_LEN, dtype="float32", **args.engine)
    try:
        with raycore_server(engine) as api, prometheus(args.prometheus, urlsplit(api.root).netloc) as client:
            send_load(api)
            time.sleep(2 * SCRAPE_S)
            known = set(client.get("/api/v1/label/__name__/values").json()["data"])
            reasons = {panel: why_empty(client, panel, known) for panel in panels}
    finally:
        engine.shutdown()
    for panel, reason in reasons.items():
        if reason is not None:
            print(f"{panel.dashboard}: {panel.title}: {reason}\n    {panel.expression}")
    rows = [("dashboard", "panels", "empty", "expressions", "empty")]
    for path in args.dashboards:
        own = [panel for panel in panels if panel.dashboard == path.name]
        empty = [panel for panel in own if reasons[panel] is not None]
        titles, full = ({panel.title for panel in some} for some in (own, [p for p in own if reasons[p] is None]))
        rows.append((path.name, *map(str, (len(titles), len(titles - full), len(own), len(empty)))))
    print("\n" + table(rows))
    return any(reason is not None and reason.startswith("Prometheus refuses") for reason in reasons.values())


if __name__ == "__main__":
    raise SystemExit(main())
