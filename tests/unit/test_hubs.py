"""What all capabilities pass through stays small, and doesn't ask which of them there are.

A *hub* composes parts: it calls hooks of a base class whose methods do nothing, such as `SchedulerPart`. A question
about a part is a test for None or for truth of something that is declared as `SomeClass | None`, where the class is one
of raycore's and no mere value, and any `isinstance` or `hasattr` of such a class. Numbers, strings and values that may
be None are state. Read from the syntax trees.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "raycore").rglob("*.py"))

HUBS = [
    "scheduler/scheduler.py",
    "engine/core.py",
    "worker/worker.py",
    "runner/runner.py",
    "client/client.py",
    "client/request_table.py",
    "cluster/manager.py",
]

MAX_CLASS_LINES = 500
MAX_PARAMETERS = 10
LONG_CONSTRUCTORS = {
    "kernels/gpu/attention.py:PagedAttention": 13,
    "kernels/gpu/latent_attention.py:LatentAttentionKernels": 11,
    "scheduler/protocol.py:SchedulerProtocol": 14,
}
"""Those with more parameters, and how many. The numbers only fall."""

_VALUES = {"Struct", "NamedTuple", "Enum", "IntEnum", "StrEnum", "Flag", "Exception", "BaseException", "TypedDict"}
"""Subclasses of these are values: what they are isn't asked of a capability."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """The classes of raycore, by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


@cache
def is_part(name: str) -> bool:
    """Whether a class of raycore has this name that isn't a mere value."""
    return any(not is_value(each) for each in classes().get(name, ()))


def is_value(node: ast.ClassDef) -> bool:
    if any("frozen=True" in ast.unparse(each) for each in node.decorator_list):
        return True
    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    return any(base in _VALUES or (base in classes() and not is_part(base)) for base in bases)


def is_optional_part(annotation: ast.expr | None) -> bool:
    """Whether a type is that of a part, or None."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    options: list[str] = []
    while isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        options.append(ast.unparse(annotation.right))
        annotation = annotation.left
    if annotation is None:
        return False
    options.append(ast.unparse(annotation))
    return "None" in options and any(is_part(each.partition("[")[0].rpartition(".")[2]) for each in options)


@cache
def optional_attributes() -> frozenset[str]:
    """The names of attributes and properties that some class of raycore declares as a part or None."""
    return frozenset(name for path in SOURCES for name in declared_in(parsed(path), attributes_only=True))


@cache
def optional_functions() -> frozenset[str]:
    """The names of raycore's functions that return a part or None."""
    tops = (node for path in SOURCES for node in parsed(path).body)
    return frozenset(node.name for node in tops if isinstance(node, ast.FunctionDef) and is_optional_part(node.returns))


def declared_in(tree: ast.AST, *, attributes_only: bool = False) -> Iterator[str]:
    """The names that are declared as a part or None: variables, parameters, attributes, and what is assigned them."""
    declared: set[str] = set(optional_functions())
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and is_optional_part(node.annotation):
            if isinstance(node.target, ast.Attribute):
                yield node.target.attr
            elif isinstance(node.target, ast.Name):
                declared.add(node.target.id)
        elif isinstance(node, ast.arg) and is_optional_part(node.annotation):
            declared.add(node.arg)
        elif isinstance(node, ast.FunctionDef) and is_optional_part(node.returns):
            if any(ast.unparse(each) == "property" for each in node.decorator_list):
                yield node.name
            declared.add(node.name)
    for node in ast.walk(tree):  # self.part = part, self.part = self.make_part()
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            value = node.value.func if isinstance(node.value, ast.Call) else node.value
            if terminal(value) in declared and isinstance(node.targets[0], ast.Attribute):
                yield node.targets[0].attr
    if not attributes_only:
        yield from declared


def terminal(node: ast.AST) -> str:
    """The last name of `a.b.c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def questions(tree: ast.Module, elsewhere: frozenset[str] = frozenset()) -> list[str]:
    """The questions about parts in a module, each with its line.

    `elsewhere`: the names of attributes of other objects that may be a part or None.
    """
    own = set(declared_in(tree))

    def is_asked_of(node: ast.AST) -> bool:
        if isinstance(node, ast.NamedExpr):
            node = node.target
        name = terminal(node)
        is_own = isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self")
        return bool(name) and (name in own if is_own else name in elsewhere)

    found: list[str] = []
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            asked = [node.left] if ast.unparse(node.comparators[0]) == "None" else []
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            asked = [node.test]
        elif isinstance(node, ast.BoolOp):
            asked = list(node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            asked = [node.operand]
        elif isinstance(node, ast.Call) and terminal(node.func) == "bool" and node.args:
            asked = [node.args[0]]
        elif isinstance(node, ast.Call) and terminal(node.func) == "hasattr":
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and terminal(node.func) == "isinstance":
            kinds = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
            found += [f"{node.lineno}: {ast.unparse(node)}" for kind in kinds if is_part(terminal(kind))]
        found += [f"{each.lineno}: {ast.unparse(each)}" for each in asked if is_asked_of(each)]
    return sorted(set(found), key=lambda each: int(each.partition(":")[0]))


@pytest.mark.parametrize("name", HUBS)
def test_a_hub_does_not_ask_which_parts_there_are(name: str) -> None:
    assert questions(parsed(ROOT / "raycore" / name), optional_attributes()) == []


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("def f(part: Scheduler | None): return 1 if part is None else 2", 1),
        ("def f(part: 'Scheduler | None'): return not part", 1),
        ("class A:\n def f(self): self.x: Scheduler | None = None\n def g(self): return self.x is not None", 1),
        ("class A:\n def f(self, x: Scheduler | None): self.y = x\n def g(self): return bool(self.y)", 1),
        ("class A:\n def m(self) -> Scheduler | None: ...\n def f(self): self.y = self.m(); not self.y", 1),
        ("def f(a: Scheduler | None):\n while a: pass", 1),
        ("def f(x): return isinstance(x, Scheduler)", 1),
        ("def f(x): return hasattr(x, 'hook')", 1),
        ("def f(x): return x.part is None", 1),
        ("def f(x: int | None, y: str | None, z: StepPlan | None): return x is None or y or z is None", 0),
        ("def f(x): return isinstance(x, (int, StepPlan, InvalidRequest))", 0),
        ("def f(part: Scheduler): return part.other is None", 0),
        ("def f(parts: list[Scheduler]): return [part for part in parts]", 0),
    ],
)
def test_what_counts_as_a_question(code: str, count: int) -> None:
    assert len(questions(ast.parse(code), frozenset({"part"}))) == count


def test_classes_stay_short() -> None:
    lengths = {
        f"{path.relative_to(ROOT / 'raycore')}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_CLASS_LINES} == {}


def test_constructors_have_few_parameters() -> None:
    numbers = {
        f"{path.relative_to(ROOT / 'raycore')}:{node.name}": len(init.args.args) + len(init.args.kwonlyargs) - 1
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
        for init in node.body
        if isinstance(init, ast.FunctionDef) and init.name == "__init__"
    }
    assert {name: number for name, number in numbers.items() if number > MAX_PARAMETERS} == LONG_CONSTRUCTORS
