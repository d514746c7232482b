"""Lets other threads go on between any two statements of the product, because a lock that is missing is no place.

The functions of the modules that `everywhere` names are compiled with a call before each statement. Python's tracing
would do the same, but not while a greenlet changes, and at a place that depends on Python's version.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

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


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = _Pauses().visit(ast.parse(self.get_data(path), path))
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, names: Callable[[str], bool]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self._names(fullname):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def everywhere(packages: Sequence[str]) -> None:
    """From now on, modules of these packages are imported with a place to change threads before each statement."""
    setattr(builtins, _NAME, pause)
    prefixes = tuple(f"{package}." for package in packages)
    sys.meta_path.insert(0, _Finder(lambda name: name in packages or name.startswith(prefixes)))
