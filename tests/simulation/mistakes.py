"""Errors by which a program shows a mistake of its own, and not what has broken around it.

Whoever catches all errors of a thread, of a call or of a step hides such, too: a rank ends and another one comes, a
block is computed that could have been read. So they count wherever they come out of the product's own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import InvalidStateError
from pathlib import Path
from types import CodeType

from ray.exceptions import RayTaskError

from simulation.world import kernel
from simulation.world.kernel import World

_KINDS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)
_OF_FUTURES = (InvalidStateError,)
"""What futures raise when they are used wrongly, wherever they are."""
_CHANGED_MEANWHILE = ("changed size during iteration", "mutated during iteration")
"""What Python says of a loop over something that another thread changes."""
_SOURCES = tuple(str(Path(__file__).parents[2] / name) + "/" for name in ("raycore", "placement"))
_NAME = "mistakes"


def note(error: BaseException | None, where: str) -> None:
    """Note what somebody has caught, if it is a mistake of the product.

    Args:
        where: what it has ended, or who says so.
    """
    from raycore.errors import InvalidInput  # imported lazily: first comes the world in which it is

    world, seen = kernel.the_world, set[int]()
    while world is not None and error is not None and id(error) not in seen:
        if isinstance(error, InvalidInput):
            return  # it says what a user's mistake is, whatever has shown it
        seen.add(id(error))
        place = _place(error) if _is_one(error) else None
        if place is not None:
            text = f"{where}: {type(error).__name__} in {place}: {error}"
            world.systems.setdefault(_NAME, {}).setdefault(text)
        error = error.__cause__


def of(world: World) -> Iterator[str]:
    """All that were noted."""
    yield from world.systems.get(_NAME, {})


def _is_one(error: BaseException) -> bool:
    if isinstance(error, RayTaskError):
        return False  # it was noted in the process that has raised it
    said = isinstance(error, RuntimeError) and any(text in str(error) for text in _CHANGED_MEANWHILE)
    return isinstance(error, (*_KINDS, *_OF_FUTURES)) or said


def _place(error: BaseException) -> str | None:
    """Where it was raised, if that is in the product."""
    trace, codes = error.__traceback__, list[CodeType]()
    while trace is not None:
        codes.append(trace.tb_frame.f_code)
        trace = trace.tb_next
    own = [code for code in codes if code.co_filename.startswith(_SOURCES)]
    is_its = bool(own) and (own[-1] is codes[-1] or isinstance(error, _OF_FUTURES))
    return f"{own[-1].co_name}()" if is_its else None
