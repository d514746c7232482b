"""Notes which of some places are run, as those that faults change, in sources without faults.

A seed that runs none of a fault's places has the same story with the fault.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from simulation.history import faults
from simulation.history.faults import DoesNotApply
from simulation.world.imported import change_at_import

_NAME = "__reached__"
Marks = dict[str, list[tuple[range, str]]]
"""By module: lines, counted from 1, and the name of what changes them."""

reached: set[str] = set()
"""The names of those of which a place has been run."""


def of_faults(root: Path) -> Marks:
    """The places of all faults that apply to the sources, by commit."""
    marks: Marks = defaultdict(list)
    for commit in faults.known():
        with suppress(DoesNotApply):
            for change in faults.read(commit).changes:
                place = change.place(root)
                module = change.file.removesuffix(".py").replace("/", ".")
                marks[module].append((range(place.start + 1, place.stop + 1), commit))
    return marks


def put(marks: Marks) -> None:
    """From now on, modules are imported with these marks."""
    setattr(builtins, _NAME, reached.add)
    for module, wanted in marks.items():
        change_at_import(
            lambda name, module=module: name == module, lambda tree, wanted=tuple(wanted): marked(tree, wanted)
        )


def marked(tree: ast.Module, wanted: Sequence[tuple[range, str]]) -> ast.Module:
    """A module with a call before the first statement of each place, and before those of other blocks there."""
    for lines, name in wanted:
        blocks = [block for node in ast.walk(tree) for block in _blocks(node)]
        inside = [(block, each) for block in blocks for each in block if each.lineno in lines]
        if not inside:  # the lines are in the middle of a statement: the innermost one
            around = [
                (block, each)
                for block in blocks
                for each in block
                if each.lineno <= lines.start and lines.stop - 1 <= (each.end_lineno or each.lineno)
            ]
            inside = around[-1:]
        for block, statement in inside:
            call = ast.Expr(ast.Call(ast.Name(_NAME, ast.Load()), [ast.Constant(name)], []))
            block.insert(block.index(statement), ast.fix_missing_locations(ast.copy_location(call, statement)))
    return tree


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    found = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
    return [block for block in found if isinstance(block, list) and block and isinstance(block[0], ast.stmt)]
