"""Lets something happen between any two statements of the product.

By default other threads may go on there, because a lock that is missing is no place. The functions of the modules that
`everywhere` names are compiled with a call before each statement. Python's tracing would do the same, but not while a
greenlet changes, and at a place that depends on Python's version.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Sequence
from typing import Any

from simulation.world.imported import change_at_import
from simulation.world.kernel import pause


class _Calls(ast.NodeTransformer):
    """Adds calls of a builtin to all blocks inside functions."""

    def __init__(self, name: str) -> None:
        self._name = name
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
                    setattr(node, name, self._with_calls(block, name == "body" and _is_function(node)))
        return node

    def _with_calls(self, block: list[ast.stmt], may_have_docstring: bool) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for index, statement in enumerate(block):
            is_docstring = (
                may_have_docstring and not index and isinstance(getattr(statement, "value", None), ast.Constant)
            )
            if not is_docstring and not isinstance(statement, (ast.Global, ast.Nonlocal)):
                call = ast.Expr(ast.Call(ast.Name(self._name, ast.Load()), [], []))
                made.append(ast.fix_missing_locations(ast.copy_location(call, statement)))
            made.append(statement)
        return made


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def everywhere(packages: Sequence[str], call: Callable[[], object] = pause) -> None:
    """From now on, modules of these packages are imported with a call of `call` before each statement."""
    name = f"__{call.__module__.rpartition('.')[2]}_{call.__name__}__"
    setattr(builtins, name, call)
    prefixes = tuple(f"{package}." for package in packages)
    change_at_import(
        lambda module: module in packages or module.startswith(prefixes), lambda tree: _Calls(name).visit(tree)
    )
