"""The actors of the scenarios. They run on either Ray."""

from __future__ import annotations

from typing import Any

from ray import method
from rays import LONG_S, eventually, here

GROUPS = {"io": 1, "run": 1, "pair": 2, "outputs": 2}


class Unpicklable(Exception):
    """An exception that can't travel."""

    def __init__(self) -> None:
        super().__init__("it has a lock")
        self.lock = __import__("threading").Lock()


class TwoArguments(Exception):
    """An exception that unpickling can't make again by its `args`."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class NoBase(Exception):
    """An exception from which no class may be derived."""

    def __init_subclass__(cls) -> None:
        raise TypeError("no class is derived from this one")


FAILURES: dict[str, Any] = {
    "key": lambda: KeyError("lost"),
    "unpicklable": Unpicklable,
    "two arguments": lambda: TwoArguments("one", "two"),
    "no base": lambda: NoBase("it has no children"),
}


class Probe:
    """Tells what has happened to it, and holds calls until its gate is opened."""

    def __init__(self, first: object = None, then: object = None) -> None:
        ray = here()
        self.seen: list[Any] = [] if first is None else [first]
        self.children: list[Any] = []
        self.num_held = 0
        self.gate = ray.Event()
        if then == "raises in a call":
            self.children.append(probe_class(ray).options(name="its child").remote())
            self.held = self.children[0].hold.remote()
            ray.get(self.children[0].wait_for_held.remote(1))
        if then in ("raises", "raises in a call"):
            raise ValueError("no room for weights")
        if then == "exits":
            ray.exit_process(7)
        if then == "is killed":
            ray.end(ray.getpid())
        if then == "is slow":
            ray.sleep(1.0)

    def pid(self) -> int:
        return here().getpid()

    @method(concurrency_group="io")
    def add(self, value: object) -> list[Any]:
        self.seen.append(value)
        return self.seen

    @method(concurrency_group="io", num_returns=0)
    def tell(self, value: object) -> None:
        self.seen.append(value)
        if value == "raises":
            raise ValueError("nobody hears this")

    @method(concurrency_group="io")
    def look(self) -> list[Any]:
        return self.seen

    @method(concurrency_group="io")
    def open(self) -> None:
        self.gate.set()

    @method(concurrency_group="io")
    def wait_for_held(self, number: int) -> int:
        """Wait until so many calls are held."""
        eventually(lambda: self.num_held >= number, "no calls are held")
        return self.num_held

    def hold_it(self) -> None:
        self.num_held += 1
        assert self.gate.wait(LONG_S)

    @method(concurrency_group="run")
    def hold(self, value: object = "held") -> object:
        self.hold_it()
        self.seen.append(value)
        return value

    @method(concurrency_group="pair")
    def hold_beside(self, value: object) -> object:
        self.seen.append(value)
        self.hold_it()
        return value

    @method(concurrency_group="run")
    def echo(self, value: object = None) -> object:
        return value

    @method(concurrency_group="run")
    def type_of(self, value: object) -> str:
        return type(value).__name__

    @method(concurrency_group="run")
    def get_first(self, refs: list[Any]) -> object:
        """The value of a ref in a list, or the name of the error."""
        try:
            return here().get(refs[0], timeout=LONG_S)
        except Exception as error:
            return type(error).__name__

    @method(concurrency_group="run")
    def fail(self, how: str = "key") -> None:
        raise FAILURES[how]()

    @method(concurrency_group="run")
    def exit(self, value: object) -> None:
        """End this process after some work."""
        self.seen.append(value)
        here().exit_process(3)

    @method(concurrency_group="outputs")
    def outputs(self, count: int, held_at: int = -1, fails_at: int = -1, size: int = 0) -> Any:
        for number in range(count):
            if number == held_at:
                self.hold_it()
            if number == fails_at:
                raise KeyError(number)
            self.seen.append(number)
            yield bytes(size) if size else number

    @method(concurrency_group="run")
    def start_child(self, name: str = "", lifetime: str | None = None) -> Any:
        """A new actor that this one owns."""
        options = {"name": name} if name else {}
        child = probe_class(here()).options(lifetime=lifetime, **options).remote()
        here().get(child.pid.remote())
        self.children.append(child)
        return child

    @method(concurrency_group="run")
    def call_of_child(self) -> list[Any]:
        """A ref that this process owns, of a call that doesn't end."""
        return [self.children[-1].hold.remote()]

    @method(concurrency_group="run")
    def make_group(self, name: str) -> Any:
        return here().placement_group([{"CPU": 0.01}], name=name)

    @method(concurrency_group="run")
    def keep(self, handles: list[Any]) -> None:
        self.children.extend(handles)

    @method(concurrency_group="run")
    def forget(self) -> None:
        self.children.clear()

    @method(concurrency_group="run")
    def call_kept(self) -> object:
        return here().get(self.children[-1].pid.remote(), timeout=LONG_S)

    def own_id(self) -> str:
        return here().own_actor_id()

    def own_node(self) -> str:
        return here().own_node_id()


_classes: dict[str, Any] = {}


def probe_class(ray: Any) -> Any:
    if ray.__name__ not in _classes:
        _classes[ray.__name__] = ray.remote(max_restarts=0, num_cpus=0, concurrency_groups=GROUPS)(Probe)
    return _classes[ray.__name__]


def start(ray: Any, *args: object, **options: Any) -> Any:
    """A new probe. `options`: of the actor."""
    return probe_class(ray).options(**options).remote(*args)
