"""Nothing of raycore tells anybody that it is used: docs/production.md promises it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import raycore

FOLDER = Path(raycore.__file__).parent
CLIENTS = {"aiohttp", "grpc", "http.client", "httpx", "huggingface_hub", "requests", "urllib.request", "urllib3"}
"""What connects to other machines by names of hosts."""
CONNECTS = {
    "checkpoint/hub_cache.py": "a model's name on the hub",
    "checkpoint/hub_download.py": "a model's name on the hub",
    "cli/api_client.py": "the server that a command names",
    "cli/bench/client.py": "the server that a command names",
    "cli/bench/serve.py": "the server that a command names",
    "cluster/joining.py": "the Ray cluster that the engine joins",
    "compat/weight_transfer.py": "the server that a trainer names",
    "parts/images/client/fetching.py": "the URLs in requests",
}
"""The modules that do, and to where."""


def imported(path: Path) -> Iterator[str]:
    """The names of all modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def is_client(module: str) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in CLIENTS)


def test_only_modules_that_users_point_somewhere_connect_to_other_machines() -> None:
    found = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py") if any(map(is_client, imported(path)))}
    assert found == set(CONNECTS)


def test_no_text_names_a_place_that_collects_usage() -> None:
    texts = {str(path.relative_to(FOLDER)): path.read_text() for path in FOLDER.rglob("*.py")}
    assert [
        path for path, text in texts.items() if re.search(r"https?://[\w.-]*(stats|usage|telemetry|posthog)", text)
    ] == []
