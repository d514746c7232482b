"""Lets something happen between any two statements of the product.

By default other threads may go on there, because a lock that is missing is no place. The functions of the modules that
`everywhere` names are compiled with a call before each statement, and with one in the middle of each that stores in an
attribute what it makes of that attribute, as `self.count += 1`: two threads may both read it before either stores it.
Python's tracing would do the same for whole statements, but not while a greenlet changes, and at a place that depends
on Python's version.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Sequence
from copy import deepcopy
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
                made += _in_parts(statement, call)
            else:
                made.append(statement)
        return made


_NEW = "__new__value__"


def _in_parts(statement: ast.stmt, call: ast.stmt) -> list[ast.stmt]:
    """The statement, with a call after what it reads and before what it stores if that is the same attribute."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Attribute):
        value: ast.expr = ast.Attribute(statement.target.value, statement.target.attr, ast.Load())
        target = statement.target
        parts: list[ast.stmt] = [ast.AugAssign(ast.Name(_NEW, ast.Store()), statement.op, statement.value)]
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1 and _changes_attribute(statement):
        (target,), value, parts = statement.targets, statement.value, []
    else:
        return [statement]
    read = ast.Assign([ast.Name(_NEW, ast.Store())], value)
    stored = ast.Assign([target], ast.Name(_NEW, ast.Load()))
    made = [ast.copy_location(each, statement) for each in (read, *parts, deepcopy(call), stored)]
    return [ast.fix_missing_locations(each) for each in made]


def _changes_attribute(statement: ast.Assign) -> bool:
    names = [
        {node.attr for node in ast.walk(each) if isinstance(node, ast.Attribute) and isinstance(node.ctx, kind)}
        for each, kind in ((statement.targets[0], ast.Store), (statement.value, ast.Load))
    ]
    return bool(names[0] & names[1])


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
