"""Mutations: what is changed, and that the changed module is what is imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from simulation import mutate, mutations
from simulation.mutations import KINDS, Mutation
from simulation.world import imported, statements

ROOT = mutate.ROOT
SOURCE = '''"""A module."""

from contextlib import suppress

class Box:
    """A box."""

    def __init__(self, lock, queue):
        """Make one."""
        self.lock, self.queue, self.items = lock, queue, []

    def take(self, item):
        with self.lock:
            self.items.append(item)
            self.queue.put(item)
        if item > 3:
            self.items.clear()
        with suppress(BlockingIOError):
            return self.items
'''


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "boxes.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(imported, "_finder", imported._Finder())
    monkeypatch.delitem(sys.modules, "boxes", raising=False)
    return path


def test_each_kind_is_found_where_it_can_be(path: Path):
    found = [str(each).partition(": ")[2] for each in mutations.in_file(path, path.parent)]
    assert found == [
        "a statement dropped: self.lock, self.queue, self.items = (lock, queue, []) -> pass",
        "a statement dropped: self.items.append(item) -> pass",
        "a statement dropped: self.queue.put(item) -> pass",
        "a statement dropped: self.items.clear() -> pass",
        "two statements swapped: self.items.append(item) -> self.queue.put(item)",
        "a lock not taken: with self.lock: self.items.append(item) self.queue.put(item) "
        "-> self.items.append(item); self.queue.put(item)",
        "a condition turned: if item > 3: self.items.clear() -> if not item > 3: self.items.clear()",
        "a release forgotten: self.items.clear() -> pass",
        "a message sent twice: self.items.append(item) -> self.items.append(item); self.items.append(item)",
        "a message sent twice: self.queue.put(item) -> self.queue.put(item); self.queue.put(item)",
    ]


@pytest.mark.parametrize(
    ("block", "matters"),
    [
        ("a = 1; b = c", False),
        ("a = f(); b = c.d", False),
        ("a = 1; b = a", True),
        ("self.a = 1; b = self.a", True),
        ("a = f(); b = g()", True),
        ("a = 1; a = 2", True),
        ("if c: return\nself.a = 1", True),
    ],
)
def test_statements_are_swapped_only_where_their_order_matters(tmp_path: Path, block: str, matters: bool):
    path = tmp_path / "swaps.py"
    path.write_text("def f(self):\n" + "".join(f"    {line}\n" for line in block.splitlines()))
    kinds = {each.kind for each in mutations.in_file(path, tmp_path)}
    assert ("two statements swapped" in kinds) is matters


class Recording:
    """A lock and a queue that note what is done with them."""

    def __init__(self) -> None:
        self.noted: list[object] = []

    def __enter__(self) -> None:
        self.noted.append("locked")

    def __exit__(self, *exc: object) -> None:
        self.noted.append("released")

    def put(self, item: object) -> None:
        self.noted.append(item)


@pytest.mark.parametrize(
    ("kind", "noted", "items"),
    [
        ("a statement dropped", ["locked", 7, "released"], []),
        ("two statements swapped", ["locked", 7, "released"], []),
        ("a lock not taken", [7], []),
        ("a condition turned", ["locked", 7, "released"], [7]),
        ("a release forgotten", ["locked", 7, "released"], [7]),
        ("a message sent twice", ["locked", 7, 7, "released"], []),
    ],
)
def test_the_module_is_imported_with_the_change(path: Path, kind: str, noted: list[object], items: list[int]):
    of_kind = [each for each in mutations.in_file(path, path.parent) if each.kind == kind]
    mutations.install(of_kind[1 if kind in ("a statement dropped", "a message sent twice") else 0])
    statements.everywhere(["boxes"])  # both changes are made
    recording = Recording()
    box = importlib.import_module("boxes").Box(recording, recording)
    assert box.take(7) == items
    assert recording.noted == noted


def test_what_was_imported_before_changes_in_place(path: Path):
    calls: list[int] = []

    def note() -> None:
        calls.append(1)

    statements.everywhere(["boxes"], note)
    recording = Recording()
    box = importlib.import_module("boxes").Box(recording, recording)
    took = box.take
    (mutation,) = [each for each in mutations.in_file(path, path.parent) if each.kind == "a lock not taken"]
    mutations.install(mutation)
    calls.clear()
    assert took(7) == []
    assert recording.noted == [7]
    assert len(calls) == 6  # other changes are made, too


def test_a_place_that_is_not_there_is_named(path: Path):
    mutations.install(Mutation("boxes.py", 1, "a lock not taken", 5, "x", "y", ""))
    with pytest.raises(ValueError, match=r"there is no such place: boxes.py:1: a lock not taken: x -> y"):
        importlib.import_module("boxes")


def test_a_draw_has_all_kinds_alike_and_is_the_same_again(path: Path):
    drawn = mutations.draw([path], path.parent, 6, seed=1)
    assert {each.kind for each in drawn} == set(KINDS)
    assert mutations.draw([path], path.parent, 6, seed=1) == drawn
    assert len(set(mutations.draw([path], path.parent, 100, seed=1))) == 10


def test_a_draw_stays_the_same_where_the_sources_do(path: Path):
    path.write_text(f"{SOURCE}        self.items.append(item)\n" * 2)
    drawn = mutations.draw([path], path.parent, 100, seed=1)
    assert len({each.name for each in drawn}) == len(drawn)  # also of places with the same text
    path.write_text("# it begins later\n" + path.read_text().replace("item > 3", "item > 4"))
    moved = [each for each in mutations.draw([path], path.parent, 100, seed=1) if "item > 4" not in each.name]
    assert [(each.name, each.line) for each in moved] == [
        (each.name, each.line + 1) for each in drawn if "item > 3" not in each.name
    ]


def test_what_is_listed_as_equal_is_in_the_sources():
    reasons = mutations.equal()
    files = {ROOT / name.partition(":")[0] for name in reasons}
    assert files <= set(mutate.paths())
    assert not set(reasons) - {each.name for file in files for each in mutations.in_file(file, ROOT)}


def test_what_is_not_simulated_is_there():
    assert [name for name in mutate._NOT_SIMULATED if not (ROOT / name).exists()] == []
