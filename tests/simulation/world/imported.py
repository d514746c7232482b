"""Modules of the product that are compiled from another syntax tree than their file's."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

Change = Callable[[ast.Module], ast.Module]


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, changes: Sequence[Change]) -> None:
        super().__init__(fullname, path)
        self._changes = changes

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for change in self._changes:
            tree = change(tree)
        return compiled(tree, path)


def compiled(tree: ast.Module, path: str) -> CodeType:
    """The code of a module from this file."""
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds the modules that are changed."""

    def __init__(self) -> None:
        self.changes: list[tuple[Callable[[str], bool], Change]] = []

    def of(self, fullname: str) -> list[Change]:
        return [change for concerns, change in self.changes if concerns(fullname)]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        changes = self.of(fullname)
        spec = PathFinder.find_spec(fullname, path) if changes else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path, changes)
        return spec


_finder = _Finder()


def change_at_import(concerns: Callable[[str], bool], change: Change) -> None:
    """From now on, modules for whose name `concerns` returns True are compiled from what `change` makes of their tree.

    A later call's change is made after those of earlier ones.
    """
    _finder.changes.append((concerns, change))
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def changed_as_imported(name: str, tree: ast.Module) -> ast.Module:
    """The tree of a module after all changes that are made when it is imported."""
    for change in _finder.of(name):
        tree = change(tree)
    return tree
