"""Notes which of the places that faults change are run, in sources without faults.

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
"""By module: lines, counted from 1, and the commit whose fault changes them."""

reached: set[str] = set()
"""The commits of whose faults a place has been run."""


def everywhere(root: Path) -> None:
    """From now on, modules are imported with marks at the places of all faults that apply to the sources."""
    marks: Marks = defaultdict(list)
    for commit in faults.known():
        with suppress(DoesNotApply):
            for change in faults.read(commit).changes:
                place = change.place(root)
                module = change.file.removesuffix(".py").replace("/", ".")
                marks[module].append((range(place.start + 1, place.stop + 1), commit))
    setattr(builtins, _NAME, reached.add)
    for module, wanted in marks.items():
        change_at_import(
            lambda name, module=module: name == module, lambda tree, wanted=tuple(wanted): marked(tree, wanted)
        )


def marked(tree: ast.Module, wanted: Sequence[tuple[range, str]]) -> ast.Module:
    """A module with a call before the first statement of each place, and before those of other blocks there."""
    for lines, commit in wanted:
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
            call = ast.Expr(ast.Call(ast.Name(_NAME, ast.Load()), [ast.Constant(commit)], []))
            block.insert(block.index(statement), ast.fix_missing_locations(ast.copy_location(call, statement)))
    return tree


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    found = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
    return [block for block in found if isinstance(block, list) and block and isinstance(block[0], ast.stmt)]
