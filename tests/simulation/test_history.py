"""Faults that come back: what applies to the sources, what no longer does, and that seeds find an easy one."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.history import __main__ as history
from simulation.history import faults, marks
from simulation.history.faults import Change, DoesNotApply

ROOT = Path(__file__).parents[2]
SOURCE = """def take(self):
    if self.open:
        self.count()

        return 1
    self.count()
    return 2
"""


def listed() -> dict[str, tuple[str, str]]:
    """The commits that the page lists: a cross or nothing, and the subject."""
    page = (faults.HERE / "README.md").read_text()
    rows = re.findall(r"^\| *(✗?) *\| ([0-9a-f]{8}) \| ([^|]*?) \|", page, re.MULTILINE)
    return {commit: (cross, subject) for cross, commit, subject in rows}


def test_each_open_fault_has_a_file_and_others_may():
    page = listed()
    assert {commit for commit, (cross, _) in page.items() if not cross} <= set(faults.known())
    for commit in faults.known():
        assert faults.read(commit).subject == page[commit][1]


@pytest.mark.parametrize("commit", faults.known())
def test_it_applies_to_the_sources(commit: str, tmp_path: Path):
    fault = faults.read(commit)
    assert bool(fault.changes) != bool(fault.impossible)
    for name in {change.file for change in fault.changes}:
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / name).read_text())
    names = {change.file for change in fault.changes}
    with fault.applied(tmp_path):
        for name in names:
            text = (tmp_path / name).read_text()
            compile(text, name, "exec")
            assert text != (ROOT / name).read_text()
    for name in names:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()


def test_a_text_is_found_however_far_it_is_indented(tmp_path: Path):
    (tmp_path / "box.py").write_text(SOURCE)
    Change("box.py", "self.count()\n\nreturn 1\n", "if True:\n    return 3\n").apply(tmp_path)
    assert (tmp_path / "box.py").read_text() == SOURCE.replace(
        "        self.count()\n\n        return 1\n", "        if True:\n            return 3\n"
    )


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("box.py", "self.count()", "box.py has 2 times:\n    self.count()"),
        ("box.py", "self.count()\n    return 1", "box.py has nowhere:\n    self.count()\n        return 1"),
        ("bag.py", "return 1", "bag.py is gone"),
    ],
)
def test_what_no_longer_applies_is_named(file: str, text: str, said: str, tmp_path: Path):
    (tmp_path / "box.py").write_text(SOURCE)
    with pytest.raises(DoesNotApply, match=re.escape(said)):
        Change(file, text, "pass").apply(tmp_path)
    assert (tmp_path / "box.py").read_text() == SOURCE


MARKED = """def take(self):
    if self.open:
        reached('if')
        self.count()
        return 1
    reached('call')
    self.count(
        2,
    )
    return 2"""


def test_what_a_fault_changes_is_marked():
    source = MARKED.replace("        reached('if')\n", "").replace("    reached('call')\n", "")
    tree = marks.marked(ast.parse(source), [(range(3, 4), "if"), (range(6, 7), "call")])
    expected = MARKED.replace("(\n        2,\n    )", "(2)").replace("reached", "__reached__")
    assert ast.unparse(tree) == expected


def test_what_another_process_is_compiling_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(history, "ROOT", tmp_path)
    for part in history._COPIED:
        (tmp_path / part / "__pycache__").mkdir(parents=True)
        (tmp_path / part / "__pycache__" / "box.cpython-311.pyc").write_bytes(b"compiled")
        # it has been listed, and is gone when it is copied
        (tmp_path / part / "__pycache__" / "bag.cpython-311.pyc.140737").symlink_to(tmp_path / "gone")
    with history._copy() as root:
        copied = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert copied == {f"{part}/__pycache__/box.cpython-311.pyc" for part in history._COPIED}


@pytest.mark.timeout(700)
def test_an_easy_fault_is_found_and_the_sources_stay_as_they_are():
    path = ROOT / "raycore/cluster/reservations.py"
    before = path.read_bytes()
    command = [sys.executable, "-m", "tests.simulation.history", "a0ad9abc", "--seeds", "1", "--programs", "owners"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    assert "a0ad9abc  What an engine in an actor" in run.stdout
    assert "found by owners, seed 0 (1. of 1 that get there)" in run.stdout
    assert path.read_bytes() == before
