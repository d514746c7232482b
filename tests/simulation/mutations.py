"""Small faults, made by changing the control plane's syntax trees, by which the judges are judged."""

from __future__ import annotations

import ast
import gc
import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import yaml

from simulation.world.imported import change_at_import, changed_as_imported, compiled

_RELEASES = (
    "release free close discard remove pop cancel clear unlink end kill forget drop give_back decrement unsubscribe "
    "notify notify_all set_result set_exception set stop join delete"
)
_SENDS = "remote put put_nowait submit send publish append call_soon_threadsafe"
_LOCKS = ("lock", "mutex", "condition", "changing", "changed", "delivering", "creating", "scaling")


@dataclass(frozen=True)
class Mutation:
    """One changed place."""

    path: str
    """Of the file, relative to the project."""
    line: int
    kind: str
    index: int
    """Which of the file's places of this kind."""
    before: str
    after: str
    digest: str
    """Of the whole text that is changed, and of how many places before it in the file have the same."""

    @property
    def name(self) -> str:
        """What stays the same as long as the place has the same text, wherever it moves in its file."""
        return f"{self.path}: {self.kind}: {self.before} -> {self.after} #{self.digest}"

    @property
    def module(self) -> str:
        name = self.path.removesuffix(".py").replace("/", ".")
        return name.removesuffix(".__init__")

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.before} -> {self.after}"


Change = Callable[[list[ast.stmt], int], "list[ast.stmt] | None"]
"""What a block becomes if its statement at an index is changed. None: there is nothing to change in this way."""


def _dropped(block: list[ast.stmt], at: int) -> list[ast.stmt] | None:
    is_plain = isinstance(block[at], (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete)) and not _is_docstring(block[at])
    return [*block[:at], ast.Pass(), *block[at + 1 :]] if is_plain else None


def _swapped(block: list[ast.stmt], at: int) -> list[ast.stmt] | None:
    plain = (ast.Expr, ast.Assign, ast.AugAssign, ast.If, ast.For)
    pair = block[at : at + 2]
    if len(pair) < 2 or not all(isinstance(each, plain) and not _is_docstring(each) for each in pair):
        return None
    if _are_independent(*pair):
        return None
    return [*block[:at], pair[1], pair[0], *block[at + 2 :]]


def _not_locked(block: list[ast.stmt], at: int) -> list[ast.stmt] | None:
    statement = block[at]
    if not isinstance(statement, ast.With) or len(statement.items) != 1 or statement.items[0].optional_vars:
        return None
    name = ast.unparse(statement.items[0].context_expr).rpartition(".")[2].lower()
    is_lock = any(lock in name for lock in _LOCKS) and not name.startswith("suppress(")  # of a BlockingIOError
    return [*block[:at], *statement.body, *block[at + 1 :]] if is_lock else None


def _turned(block: list[ast.stmt], at: int) -> list[ast.stmt] | None:
    statement = block[at]
    if not isinstance(statement, (ast.If, ast.While)):
        return None
    turned = deepcopy(statement)
    test = turned.test
    is_negation = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    turned.test = test.operand if is_negation else ast.UnaryOp(ast.Not(), test)  # pyright: ignore[reportAttributeAccessIssue]
    return [*block[:at], turned, *block[at + 1 :]]


def _not_released(block: list[ast.stmt], at: int) -> list[ast.stmt] | None:
    return [*block[:at], ast.Pass(), *block[at + 1 :]] if _calls(block[at], _RELEASES.split()) else None


def _sent_twice(block: list[ast.stmt], at: int) -> list[ast.stmt] | None:
    return [*block[: at + 1], deepcopy(block[at]), *block[at + 1 :]] if _calls(block[at], _SENDS.split()) else None


KINDS: dict[str, Change] = {
    "a statement dropped": _dropped,
    "two statements swapped": _swapped,
    "a lock not taken": _not_locked,
    "a condition turned": _turned,
    "a release forgotten": _not_released,
    "a message sent twice": _sent_twice,
}


def _calls(statement: ast.stmt, names: Sequence[str]) -> bool:
    """Whether a statement is nothing but a call of a method of such a name."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in names


def _are_independent(first: ast.stmt, second: ast.stmt) -> bool:
    """Whether it makes no difference which of two statements comes first.

    One of them may call something, as far as nobody leaves the block and none sets what the other uses.
    """
    nodes = [list(ast.walk(each)) for each in (first, second)]
    if any(isinstance(node, (ast.Return, ast.Raise, ast.Break, ast.Continue)) for each in nodes for node in each):
        return False
    does_more = (ast.Call, ast.Subscript, ast.Await, ast.Yield, ast.YieldFrom)
    if all(any(isinstance(node, does_more) for node in each) for each in nodes):
        return False
    used = [{_named(node) for node in each} - {None} for each in nodes]
    stored = [{_named(node) for node in each if _is_stored(node)} for each in nodes]
    return not (stored[0] & used[1] or stored[1] & used[0])


def _named(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(node.ctx, ast.Load)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _blocks(tree: ast.AST) -> Iterator[tuple[Any, str, list[ast.stmt]]]:
    """(node, field, statements) of all blocks inside functions."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    seen: set[int] = set()
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.ClassDef) or id(node) in seen:
                continue
            seen.add(id(node))
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list) and block:
                    yield node, field, block


def _places(tree: ast.AST, kind: str) -> Iterator[tuple[Any, str, int, list[ast.stmt]]]:
    for node, field, block in _blocks(tree):
        for at in range(len(block)):
            changed = KINDS[kind](block, at)
            if changed is not None:
                yield node, field, at, changed


def in_file(path: Path, root: Path) -> list[Mutation]:
    """All mutations of a file."""
    found: list[Mutation] = []
    source = path.read_text()
    tree, lines, seen = ast.parse(source), source.splitlines(), Counter[str]()
    for kind in KINDS:
        for index, (node, field, at, changed) in enumerate(_places(tree, kind)):
            before = getattr(node, field)
            after = changed[at : len(changed) - len(before) + at + 1]
            first, last = before[at], before[at + (kind == "two statements swapped")]
            text = " ".join([kind, *" ".join(lines[first.lineno - 1 : last.end_lineno]).split()])
            digest = hashlib.sha256(f"{text} {seen[text]}".encode()).hexdigest()[:8]
            seen[text] += 1
            texts = _short(before[at : at + 1]), _short(after)
            found.append(Mutation(str(path.relative_to(root)), first.lineno, kind, index, *texts, digest))
    return found


def _short(statements: list[ast.stmt]) -> str:
    text = "; ".join(ast.unparse(each) for each in statements).replace("\n", " ")
    text = " ".join(text.split())
    return text if len(text) <= 90 else f"{text[:87]}..."


def draw(paths: Sequence[Path], root: Path, count: int, seed: int) -> list[Mutation]:
    """Mutations of these files, of all kinds alike. Those of a place that stays as it is are drawn again."""

    def place(mutation: Mutation) -> bytes:
        return hashlib.sha256(f"{seed} {mutation.name}".encode()).digest()

    of_kinds: dict[str, list[Mutation]] = {kind: [] for kind in KINDS}
    for each in sorted((each for path in paths for each in in_file(path, root)), key=place):
        of_kinds[each.kind].append(each)
    turns = zip_longest(*of_kinds.values())
    return [each for turn in turns for each in turn if each is not None][:count]


_EQUAL = Path(__file__).with_name("equal_mutations.yaml")


def equal() -> dict[str, str]:
    """The names of mutations after which everybody gets the same, and why."""
    listed: dict[str, str] = yaml.safe_load(_EQUAL.read_text()) or {}
    return {name: reason for reason, names in listed.items() for name in names.splitlines()}


def install(mutation: Mutation) -> None:
    """From now on, the mutation's module has it. If it was imported before, its functions change in place: what they
    have done so far stays.

    Raises:
        ValueError: the module has no such place, or a function can't be changed in place, as one that no longer says
            `super()`.
    """
    module = sys.modules.get(mutation.module)
    if module is None:
        change_at_import(lambda name: name == mutation.module, partial(_changed, mutation))
        return
    path = module.__file__
    assert path is not None
    before, after = (
        _codes(compiled(changed_as_imported(mutation.module, tree), path))
        for tree in (ast.parse(Path(path).read_text()), _changed(mutation, ast.parse(Path(path).read_text())))
    )
    pairs = {}
    for name, codes in before.items():
        if len(codes) == len(after.get(name, ())):  # a line may have several lambdas, and lose one
            pairs |= dict(zip(codes, after[name], strict=True))
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename == path:
            code = pairs.get(each.__code__)
            if code is not None and code != each.__code__:
                each.__code__ = code


def _changed(mutation: Mutation, tree: ast.Module) -> ast.Module:
    for index, (node, field, _, changed) in enumerate(_places(tree, mutation.kind)):
        if index == mutation.index:
            setattr(node, field, changed)
            return tree
    raise ValueError(f"there is no such place: {mutation}")


def _codes(module: CodeType) -> dict[tuple[str, int], list[CodeType]]:
    """What is defined in a module, at any depth, by its name and line."""
    found: dict[tuple[str, int], list[CodeType]] = defaultdict(list)
    left = [module]
    while left:
        code = left.pop()
        found[code.co_name, code.co_firstlineno].append(code)
        left += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found
