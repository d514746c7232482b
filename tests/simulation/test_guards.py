"""What locks guard: that it is watched, and that the table says it of each lock of the product."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from simulation import mutate, mutations
from simulation.world import guards, imported, threads
from simulation.world.guards import Guard, Unguarded
from simulation.world.kernel import World

NAME = "raycore.boxes_of_a_test"
SOURCE = """
from simulation.world import threads

class Box:
    def __init__(self):
        self._lock = threads.Condition(threads.Lock())
        self.items, self.count = [], 0
        self._fill()

    def _fill(self):
        self.items.append(self.count)

    def add(self, item):
        with self._lock:
            self.items.append(item)
            self.count += 1
            self.note(item)

    def add_carelessly(self, item):
        self.items.append(item)
        self.items.append(item)

    def reset(self):
        self.count = 0

    def glance(self):
        return [len(each) for each in [self.items]], self.count

    def note(self, item):
        pass

    def put_on(self, lid, colour):
        with self._lock:
            lid.colour = colour

class Lid:
    __slots__ = ("colour", "size", "lock")

    def __init__(self):
        self.size = self.colour = 0
        self.lock = threads.Lock()

    def paint(self, colour):
        self.colour = colour

    def grow(self):
        with self.lock:
            self.size = self.size + 1
        return self.size

    def shrink(self):
        self.size = self.size - 1

_lock = threads.Lock()
_count = 0
_seen = []

def count():
    global _count
    with _lock:
        _count += 1
        _seen.append(_count)

def count_carelessly():
    global _count
    _count = 7

def look():
    return len(_seen)
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, made)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(imported, "_finder", imported._Finder())
    box, lid, lock = f"{NAME}:Box", f"{NAME}:Lid", f"{NAME}:Box._lock"
    none, glances = frozenset[str](), frozenset(["glance"])
    table = (
        Guard(lock, box, "items", "touched", glances, none),
        Guard(lock, box, "count", "changed", none, none),
        Guard(lock, box, "note", "called", none, none),
        Guard(lock, lid, "colour", "touched", none, none),
        Guard(f"{lid}.lock", lid, "size", "changed", none, none),
        Guard(f"{NAME}:_lock", f"{NAME}:", "_count", "touched", none, none),
        Guard(f"{NAME}:_lock", f"{NAME}:", "_seen", "touched", none, none),
    )
    monkeypatch.setattr(guards, "table", lambda: table)
    guards.watch_variables(table)
    tree = imported.changed_as_imported(NAME, ast.parse(SOURCE))
    exec(imported.compiled(tree, "boxes"), made.__dict__)
    guards.install(table)
    return made


def of(box: Any) -> Any:
    return sys.modules[type(box).__module__]


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda box, lid: box.add(1), []),
        (lambda box, lid: box.glance(), []),
        (lambda box, lid: box.put_on(lid, 3), []),
        (lambda box, lid: lid.grow(), []),
        (lambda box, lid: box.items, []),  # not by the product
        (lambda box, lid: of(box).count(), []),
        (
            lambda box, lid: of(box).count_carelessly(),
            [f"{NAME}._count is touched without _lock, in count_carelessly of {NAME}"],
        ),
        (lambda box, lid: of(box).look(), [f"{NAME}._seen is touched without _lock, in look of {NAME}"]),
        (
            lambda box, lid: box.add_carelessly(1),
            [f"Box.items is touched without Box._lock, in add_carelessly of {NAME}"],
        ),
        (lambda box, lid: box.reset(), [f"Box.count is changed without Box._lock, in reset of {NAME}"]),
        (lambda box, lid: lid.paint(4), [f"Lid.colour is touched without Box._lock, in paint of {NAME}"]),
        (lambda box, lid: lid.shrink(), [f"Lid.size is changed without Lid.lock, in shrink of {NAME}"]),
    ],
)
def test_a_thread_that_lacks_the_lock_is_seen(module: Any, act: Callable[[Any, Any], object], said: list[str]):
    def main() -> None:
        box, lid = module.Box(), module.Lid()
        act(box, lid)
        assert box.glance() is not None

    assert _seen(main) == said


def test_a_lock_that_another_thread_has_does_not_count(module: Any):
    def main() -> None:
        box = module.Box()
        with box._lock:
            thread = threads.Thread(target=box.reset)
            thread.start()
            thread.join()

    assert _seen(main) == [f"Box.count is changed without Box._lock, in reset of {NAME}"]


def _seen(main: Callable[[], None]) -> list[str]:
    """What is seen while a thread runs `main`."""
    world = World(1)

    def run() -> None:
        thread = threads.Thread(target=main)
        thread.start()
        thread.join()

    world.run(run)
    assert all(isinstance(error, Unguarded) for _, error in world.failures), world.failures
    return [str(error) for _, error in world.failures]


# ---- the table


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """The syntax trees of what the table may speak of, by module."""
    modules = {guard.place.partition(":")[0] for guard in guards.table()}
    return {each: ast.parse(_path(each).read_text()) for each in sorted(modules)}


def _path(module: str) -> Path:
    return mutate.ROOT / f"{module.replace('.', '/')}.py"


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    (found,) = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name]
    return found


def _names(tree: ast.AST) -> set[str]:
    """Attributes and functions that are named in a piece of source."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
    return found


def test_what_is_guarded_is_in_the_sources(trees: dict[str, ast.Module]):
    parsed = [ast.parse(path.read_text()) for path in mutate.paths()]
    functions = {each.name for tree in parsed for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    for guard in guards.table():
        for text in (guard.lock, f"{guard.place}.{guard.name}".replace(":.", ":")):
            module, _, inner = text.partition(":")
            owner, _, name = inner.rpartition(".")
            assert name in _names(_class(trees[module], owner) if owner else trees[module]), guard
        assert guard.may_read | guard.may_change <= functions, guard


def test_each_lock_has_something_that_it_guards(trees: dict[str, ast.Module]):
    guarded: dict[str, set[str]] = defaultdict(set)
    for guard in guards.table():
        guarded[guard.lock].add(guard.name)
    bare: list[str] = []
    modules = {str(path.relative_to(mutate.ROOT))[:-3].replace("/", "."): path for path in mutate.paths()}
    for module, path in modules.items():
        text = path.read_text()
        if not any(f"with {each}" in text for each in ("self.", "connection.", "_lock")):
            continue
        tree = trees.get(module) or ast.parse(text)
        owners = [each for each in tree.body if isinstance(each, ast.ClassDef)]
        for node, field, at, _ in mutations._places(tree, "a lock not taken"):
            region = getattr(node, field)[at]
            owner, _, lock = ast.unparse(region.items[0].context_expr).rpartition(".")
            place = next((each.name for each in owners if each.lineno <= region.lineno <= (each.end_lineno or 0)), "")
            own = guarded.get(f"{module}:{place}.{lock}" if owner else f"{module}:{lock}", set())
            own = own if owner in ("self", "") else set()
            names = own or set().union(*(those for key, those in guarded.items() if key.endswith(f".{lock}")))
            is_a_wait = all(isinstance(each, ast.Pass) for each in region.body)
            is_elsewhere = any(isinstance(each, ast.Yield) for each in ast.walk(region))  # in whoever calls this
            if not is_a_wait and not is_elsewhere and not names & set().union(*map(_names, region.body)):
                bare.append(f"{module}, line {region.lineno}")
    assert bare == []
