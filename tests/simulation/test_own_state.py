"""Variables of modules, of which each simulated process has its own."""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import raycore
from simulation.world import system, threads
from simulation.world.kernel import World
from simulation.world.own_state import OWN, SHARED, OwnState

ROOT = Path(raycore.__file__).parents[1]
OUTSIDE = [
    "checkpoint",
    "cli",
    "compat",
    "data",
    "display",
    "encoder",
    "fallback",
    "kernels",
    "layers",
    "models",
    "runner",
    "serve",
    "server",
    "text",
    "trainer.py",
    "worker",
]
"""Parts of raycore that aren't simulated, or whose variables don't decide anything there."""
CHANGING = [
    "acquire",
    "add",
    "append",
    "appendleft",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "popleft",
    "put",
    "remove",
    "set",
    "setdefault",
    "update",
]


def changed_variables(source: str) -> set[str]:
    """The variables of a module that its functions change: by `global`, by a method, an item, `with` or `next`."""
    tree = ast.parse(source)
    variables = {
        name.id
        for statement in tree.body
        for target in (getattr(statement, "targets", None) or [getattr(statement, "target", None)])
        for name in ast.walk(target or ast.Pass())
        if isinstance(name, ast.Name)
    }
    return {
        name
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for node in ast.walk(function)
        for name in _changed(node)
        if name in variables - {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
    }


def _changed(node: ast.AST) -> Iterator[str]:
    held: ast.AST | None = None
    if isinstance(node, ast.Global):
        yield from node.names
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
        held = node.func.value
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "next":
        held = node.args[0]
    elif isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
        held = node.value
    elif isinstance(node, ast.withitem):
        held = node.context_expr
    if isinstance(held, ast.Name):
        yield held.id


def test_each_variable_that_changes_is_a_processs_own_or_has_a_reason():
    outside = tuple(str(ROOT / "raycore" / part) for part in OUTSIDE)
    paths = [*(ROOT / "placement").glob("*.py"), *(ROOT / "raycore").rglob("*.py")]
    found = {
        f"{str(path.relative_to(ROOT)).removesuffix('.py').replace('/', '.')}:{name}"
        for path in paths
        if not str(path).startswith(outside)
        for name in changed_variables(path.read_text())
    }
    own = {f"{module}:{name}" for module, names in OWN.items() for name in names}
    # its methods change it
    assert found == (own | SHARED.keys()) - {"raycore.plugins:_process"}


@pytest.mark.parametrize(
    "change",
    [
        "global state\n  state = 1",
        "state.add(1)",
        "state[1] = 2",
        "del state[1]",
        "state.x = 1",
        "with state: pass",
        "next(state)",
    ],
)
def test_each_way_to_change_a_variable_is_found(change: str):
    assert changed_variables(f"state = make()\ndef change():\n  {change}") == {"state"}


def test_what_is_only_read_or_local_is_not():
    source = "state = {}\ndef read(state=None):\n  state.add(1)\ndef look():\n  return state[1], state.get(2)\n"
    assert changed_variables(source) == set()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("own_state_of_a_test")
    made.__dict__.update(numbers=itertools.count(), seen=[], lock=threads.Lock())
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_each_process_has_its_own_values(module: ModuleType):
    own: Any = module
    results: dict[str, object] = {}
    for seed in range(20):
        world = World(seed)
        OwnState(world, {module.__name__: ["numbers", "seen", "lock"]})

        def work(name: str) -> None:
            for _ in range(5):
                with own.lock:
                    own.seen.append((name, next(own.numbers)))
                    system.time.sleep(0.001)
            results[name] = list(own.seen)

        def main(world: World = world) -> None:
            for name in ("a", "b"):
                process = world.process(name)
                world.start(process, "main", lambda name=name: work(name))
            system.time.sleep(10.0)
            assert own.seen == []

        world.run(main)
        assert results == {name: [(name, number) for number in range(5)] for name in ("a", "b")}
