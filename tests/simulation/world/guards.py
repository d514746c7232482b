"""Judges that what a lock guards is touched only by threads that hold the lock.

That two threads meet in a place that lacks its lock takes the right two statements of both, and few seeds find them.
That a thread comes there without the lock is seen each time. `guards.yaml` says which lock guards what: attributes,
which descriptors watch, calls, and variables of modules, which are compiled so that each use is seen. Nothing is wrong
in a constructor, since no other thread knows its object yet.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import yaml

from simulation.world import kernel
from simulation.world.imported import change_at_import
from simulation.world.kernel import World

T = TypeVar("T")
TABLE = Path(__file__).parents[1] / "guards.yaml"
KINDS = ("touched", "changed", "called")
"""What a thread does with a name that a lock guards: it reads or changes an attribute, changes it, calls a method."""
_PRODUCT = ("raycore.", "placement.")
_INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
"""Frames that some versions of Python have, and others haven't."""
_MAX_DEPTH = 12
"""How many callers up a constructor is looked for."""


class Unguarded(Exception):
    """A thread has touched what a lock guards without that lock."""


class Guard(NamedTuple):
    """What a lock guards of the objects of one class."""

    lock: str
    """As `module:Class.attribute`, or as `module:variable`."""
    place: str
    """The class whose objects have the name, as `module:Class`, or the module, as `module:`."""
    name: str
    kind: str
    """One of `KINDS`."""
    may_read: frozenset[str]
    """The functions that may read or call it without the lock."""
    may_change: frozenset[str]
    """Those that may change it."""

    @property
    def is_own(self) -> bool:
        """Whether the object has the lock itself. Otherwise any lock of this kind will do."""
        return _place(self.lock) == self.place

    def __str__(self) -> str:
        owner = self.place.rpartition(":")[2] or self.place.removesuffix(":")
        return f"{owner}.{self.name} is {self.kind} without {self.lock.rpartition(':')[2]}"


@functools.cache
def table() -> tuple[Guard, ...]:
    """What `guards.yaml` says."""
    found: list[Guard] = []
    for lock, said in yaml.safe_load(TABLE.read_text()).items():
        may_read, may_change = (
            frozenset(name for names in said.pop(key, {}) for name in names.split())
            for key in ("without", "changes without")
        )
        elsewhere = said.pop("elsewhere", {})
        for place, names_by_kind in ((_place(lock), said), *elsewhere.items()):
            for kind, names in names_by_kind.items():
                assert kind in KINDS, f"{lock}: {kind}"
                found += [Guard(lock, place, name, kind, may_read, may_change) for name in names.split()]
    return tuple(found)


def install(guards: Sequence[Guard]) -> None:
    """Watch all worlds of this process. What is found counts as raised in its thread."""
    for guard in guards:
        if guard.place.endswith(":"):
            continue  # see `watch_variables`
        owner, name, lock = _class(guard.place), guard.name, guard.lock.rpartition(".")[2]
        if guard.is_own:
            holds = functools.partial(_holds_own, lock)
        else:
            holds = functools.partial(_holds_any, guard.lock)
            _note_locks(guard.lock)
        if guard.kind == "called":
            if name in vars(owner):  # a fault of former times may not have it
                setattr(owner, name, _called(guard, vars(owner)[name], holds))
        else:
            inner = vars(owner).get(name)
            plain = _ChangedInSlot if hasattr(inner, "__get__") else _Changed
            setattr(owner, name, (_Touched if guard.kind == "touched" else plain)(guard, inner, holds))


def watch_variables(guards: Sequence[Guard]) -> None:
    """From now on, modules are imported so that uses of those of their variables are seen that a lock guards."""
    for module in {guard.place.removesuffix(":") for guard in guards if guard.place.endswith(":")}:
        own = {guard.name: guard for guard in guards if guard.place == f"{module}:"}
        change_at_import(module.__eq__, _Uses(own).visit)
    setattr(builtins, _USE, _use)


_USE = "__use_of_a_guarded_variable__"


class _Uses(ast.NodeTransformer):
    """Adds a call to each use of variables inside functions."""

    def __init__(self, guards: Mapping[str, Guard]) -> None:
        self._guards = guards
        self._depth = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        is_read = self._depth and node.id in self._guards and isinstance(node.ctx, ast.Load)
        return self._seen(node.id, node) if is_read else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        for target in node.targets if self._depth else ():
            if isinstance(target, ast.Name) and target.id in self._guards:
                node.value = self._seen(target.id, node.value)
        return node

    def _seen(self, name: str, value: ast.expr) -> ast.expr:
        what = [ast.Constant(each) for each in (self._guards[name].lock, name)]
        made = ast.Call(ast.Name(_USE, ast.Load()), [*what, value], [])
        return ast.fix_missing_locations(ast.copy_location(made, value))


def _use(lock: str, name: str, value: T) -> T:
    """What a use of a variable of a module becomes."""
    module, _, own = lock.partition(":")
    here = kernel.the_world
    if here is not None and here.current is not None and vars(sys.modules[module])[own].owner is not here.current:
        guard = next(each for each in table() if (each.lock, each.name) == (lock, name))
        _complain(guard, None, guard.may_read)
    return value


def _place(lock: str) -> str:
    """Whose lock it is."""
    module, _, name = lock.partition(":")
    return f"{module}:{name.rpartition('.')[0]}"


def _class(place: str) -> type:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _holds_own(lock: str, owner: Any) -> bool:
    here, own = kernel.the_world, getattr(owner, lock, None)
    if here is None or here.current is None or own is None or isinstance(own, _Lock):
        return True  # no thread runs, or the object is just being constructed
    return own.owner is here.current


def _holds_any(lock: str, _: object) -> bool:
    here = kernel.the_world
    return here is None or here.current is None or any(each.owner is here.current for each in _locks(here, lock))


def _locks(world: World, lock: str) -> list[Any]:
    return world.systems.setdefault("locks", {}).setdefault(lock, [])


class _Lock:
    """Notes the locks that become an attribute. It has no `__get__`: they are read from where they always are."""

    def __init__(self, lock: str, slot: Any) -> None:
        self._lock, self._slot = lock, slot

    def __set__(self, owner: Any, value: Any) -> None:
        if self._slot is None:
            owner.__dict__[self._lock.rpartition(".")[2]] = value
        else:
            self._slot.__set__(owner, value)
        if kernel.the_world is not None:
            _locks(kernel.the_world, self._lock).append(value)


class _LockInSlot(_Lock):
    def __get__(self, owner: Any, _: type | None = None) -> Any:
        return self._slot.__get__(owner)


def _note_locks(lock: str) -> None:
    place, _, name = lock.rpartition(".")
    owner = _class(place)
    slot = vars(owner).get(name)
    if not isinstance(slot, _Lock):
        setattr(owner, name, _Lock(lock, None) if slot is None else _LockInSlot(lock, slot))


class _Changed:
    """An attribute that is changed only with a lock."""

    def __init__(self, guard: Guard, inner: Any, holds: Callable[[Any], bool]) -> None:
        """`inner`: what the class has under this name."""
        self._guard, self._name, self._inner, self._holds = guard, guard.name, inner, holds

    def __set__(self, owner: Any, value: Any) -> None:
        if not self._holds(owner):
            _complain(self._guard, owner, self._guard.may_change)
        if hasattr(self._inner, "__set__"):
            self._inner.__set__(owner, value)
        else:
            owner.__dict__[self._name] = value


class _ChangedInSlot(_Changed):
    def __get__(self, owner: Any, _: type | None = None) -> Any:
        return self._inner.__get__(owner)


class _Touched(_Changed):
    """An attribute that is touched only with a lock."""

    def __get__(self, owner: Any, _: type | None = None) -> Any:
        if owner is None:
            return self._inner
        if not self._holds(owner):
            _complain(self._guard, owner, self._guard.may_read)
        if hasattr(self._inner, "__get__"):
            return self._inner.__get__(owner)
        try:
            return owner.__dict__[self._name]
        except KeyError:
            if self._inner is None or hasattr(self._inner, "__set__"):
                raise AttributeError(self._name) from None
            return self._inner


def _called(guard: Guard, function: Callable[..., Any], holds: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not holds(self):
            _complain(guard, self, guard.may_read)
        return function(self, *args, **kwargs)

    return called


def _complain(guard: Guard, owner: object, allowed: frozenset[str]) -> None:
    """Say once in a world that a function of the product has done without a lock."""
    world = kernel.the_world
    assert world is not None
    assert world.current is not None
    callers = _callers()
    name = callers[0].f_globals["__name__"]
    if not name.startswith(_PRODUCT) or callers[0].f_code.co_name in allowed:
        return
    if any(each.f_code.co_name == "__init__" and each.f_locals.get("self") is owner for each in callers):
        return
    text = f"{guard}, in {callers[0].f_code.co_name} of {name}"
    said: set[str] = world.systems.setdefault("unguarded", set())
    if text not in said:
        said.add(text)
        world.failures.append((world.current, Unguarded(text)))


def _callers() -> list[FrameType]:
    """Who has touched something: the innermost function first."""

    def up(frame: FrameType | None) -> Iterator[FrameType]:
        while frame is not None:
            if frame.f_code.co_name not in _INLINED:
                yield frame
            frame = frame.f_back

    frame = sys._getframe(1)
    while frame is not None and frame.f_globals is globals():
        frame = frame.f_back
    return [each for each, _ in zip(up(frame), range(_MAX_DEPTH), strict=False)]
