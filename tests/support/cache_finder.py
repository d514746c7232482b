"""Finds what outlives a request in raycore's source: values that are made once, and found again by a key."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

DECORATORS = {"lru_cache", "cache", "cached_property"}
KINDS = {"OrderedDict", "LruBytes", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "defaultdict"}
"""Containers that are hardly ever anything else than a cache."""
_PLAIN = {"dict", "set", "list", "deque", "Counter"}
_READS, _WRITES = {"get", "setdefault"}, {"setdefault", "put", "add"}


def caches_in(source: str) -> set[str]:
    """Return the names of what may be a cache: functions, variables of the module, and attributes of classes.

    That is a function whose results are kept, an empty container of a module, and an attribute that is a container of
    `KINDS`, or that one method looks a key up in and adds one to.
    """
    tree = ast.parse(source)
    return {*_of_module(tree), *_of_functions(tree, "")}


def caches_below(*directories: Path) -> set[str]:
    """Return the same of all modules below directories, with the modules' names."""
    found: set[str] = set()
    for directory in directories:
        for path in directory.rglob("*.py"):
            module = ".".join(path.relative_to(directory).with_suffix("").parts)
            found |= {f"{module}.{name}" for name in caches_in(path.read_text())}
    return found


def _of_module(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_container(node.value):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                yield target.id


def _of_functions(node: ast.AST, owner: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _of_functions(child, f"{child.name}.")
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(_name(each) in DECORATORS for each in child.decorator_list):
                yield owner + child.name
            yield from (owner + name for name in {*_looked_up_and_added(child), *_made(child)})
        yield from _of_functions(child, owner)


def _looked_up_and_added(function: ast.AST) -> set[str]:
    read, written = set[str](), set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = _attribute(node.func.value)
            read |= {name} if node.func.attr in _READS else set()
            written |= {name} if node.func.attr in _WRITES else set()
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            read.add(_attribute(node.comparators[0]))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            written.add(_attribute(node.value))
    return (read & written) - {""}


def _made(function: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if _name(node.value) in KINDS | DECORATORS:
                found.add(_attribute(target))
    return found - {""}


def _is_container(node: ast.expr) -> bool:
    if isinstance(node, ast.Dict | ast.List):
        return not (node.keys if isinstance(node, ast.Dict) else node.elts)
    return isinstance(node, ast.Call) and (_name(node) in KINDS or (not node.args and _name(node) in _PLAIN))


def _name(node: ast.expr) -> str:
    """The name of what a decorator or a call names: `cache` of `functools.cache` and of `cache(maxsize=1)`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _attribute(node: ast.expr) -> str:
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if isinstance(node, ast.Attribute) and is_own else ""
