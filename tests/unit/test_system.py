"""The control plane takes time, threads, processes and chance from `raycore.system`, which a simulation replaces."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import raycore
from raycore import system

ROOT = Path(raycore.__file__).parents[1]
NAMES = (
    "activity.py beam_search.py client cluster control engine executor kvcache llm.py llm_engine.py lru_bytes.py "
    "metrics node node/own_process.py rpc/pending.py profile_session.py ray_api.py recurring.py rpc running_engine.py "
    "scheduler serve/autoscaling.py server/multi_process status.py worker/rank.py worker/worker_actor.py"
)
SIDES = {"client", "cluster", "connectors", "control", "engine", "grammar", "guesses", "scheduler", "transfer"}
"""Of each room in `raycore/parts`."""
PACKAGES = [
    "placement",
    *(f"raycore/{name}" for name in NAMES.split()),
    *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("raycore/parts/*/*")) if path.stem in SIDES),
    "raycore/parts/adapters/server",
]
"""What decides what an engine does."""
REFUSED = {
    *(module for module, _ in system.PLACES.values()),
    "_thread",
    "concurrent",
    "multiprocessing",
    "sched",
    "selectors",
}
EXCEPTIONS = {
    "raycore/cluster/local_ray/idle_agent.py": "a program of its own, without the rest of raycore",
    "raycore/cluster/local_ray/session_reaper.py": "a program of its own, without the rest of raycore",
    "raycore/parts/constraints/grammar/gate_process.py": "the compiler's process, which is forked to be killed",
}


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules that a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant))


def refused(source: str) -> set[str]:
    """The modules among those that a file imports that it has to take from `raycore.system`."""
    return {name for name in imported(ast.parse(source)) if name in REFUSED or name.partition(".")[0] in REFUSED}


def files() -> list[Path]:
    found: list[Path] = []
    for package in PACKAGES:
        place = ROOT / package
        assert place.exists(), package
        found += [place] if place.is_file() else sorted(place.rglob("*.py"))
    return found


def test_the_control_plane_acts_on_the_system_through_one_package():
    found = {str(path.relative_to(ROOT)): names for path in files() if (names := refused(path.read_text()))}
    assert {path: names for path, names in found.items() if path not in EXCEPTIONS} == {}
    assert found.keys() == EXCEPTIONS.keys(), "an exception that nobody needs"


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os.path",
        "from os import getpid",
        "from concurrent.futures import Future",
        "import concurrent.futures",
        "def late():\n    import threading as t",
        "if TYPE_CHECKING:\n    from asyncio import Task",
        "import importlib\nimportlib.import_module('random')",
    ],
)
def test_each_way_to_import_is_refused(source: str):
    assert refused(source)


def test_other_imports_are_not():
    assert not refused("from raycore.system import os, time\nimport timeit\nfrom ostinato import x\nfrom . import time")


@pytest.mark.parametrize("name", system.PLACES)
def test_nothing_is_between_the_control_plane_and_the_standard_library(name: str):
    module, attribute = system.PLACES[name]
    own = importlib.import_module(module)
    assert getattr(system, name) is (own if attribute is None else getattr(own, attribute))
    assert vars(system)[name] is getattr(system, name), "later looks are those of any module"


def test_an_unknown_name_is_an_import_error():
    with pytest.raises(ImportError, match="cannot import name 'turtle'"):
        exec("from raycore.system import turtle")
