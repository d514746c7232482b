"""Lets other threads go on between any two statements of the product, because a lock that is missing is no place.

The functions of the modules that `everywhere` names are compiled with a call before each statement. Python's tracing
would do the same, but not while a greenlet changes, and at a place that depends on Python's version.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from typing import Any

from simulation.world.imported import change_at_import
from simulation.world.kernel import pause

_NAME = "__pause__"


class _Pauses(ast.NodeTransformer):
    """Adds the calls to all blocks inside functions."""

    def __init__(self) -> None:
        self._depth = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        depth, self._depth = self._depth, 0
        self.generic_visit(node)
        self._depth = depth
        return node

    def _function(self, node: Any) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if self._depth and not isinstance(node, ast.ClassDef):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list) and block:
                    setattr(node, name, self._with_pauses(block, name == "body" and _is_function(node)))
        return node

    @staticmethod
    def _with_pauses(block: list[ast.stmt], may_have_docstring: bool) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for index, statement in enumerate(block):
            is_docstring = (
                may_have_docstring and not index and isinstance(getattr(statement, "value", None), ast.Constant)
            )
            if not is_docstring and not isinstance(statement, (ast.Global, ast.Nonlocal)):
                call = ast.Expr(ast.Call(ast.Name(_NAME, ast.Load()), [], []))
                made.append(ast.fix_missing_locations(ast.copy_location(call, statement)))
            made.append(statement)
        return made


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def everywhere(packages: Sequence[str]) -> None:
    """From now on, modules of these packages are imported with a place to change threads before each statement."""
    setattr(builtins, _NAME, pause)
    prefixes = tuple(f"{package}." for package in packages)
    change_at_import(lambda name: name in packages or name.startswith(prefixes), lambda tree: _Pauses().visit(tree))
