"""Notices that don't come: a thread waits for a condition to its deadline, though what it waits for is there already.

Deadlines hide that somebody forgets to notify: the thread goes on, only later. What it waits for is what the product
says where it waits: the predicate, or the test of the `if` or `while` around the wait. A test that asks for the time is
asked as if none had passed. What a caller passes in is nobody's who could notify.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
from types import FrameType

from simulation.world import kernel

_PRODUCT = ("raycore.", "placement.")


def is_product(frame: FrameType) -> bool:
    """Whether a frame is one of the product."""
    return frame.f_globals.get("__name__", "").startswith(_PRODUCT)


def look(frame: FrameType, began_s: float) -> None:
    """Note if a wait in this frame, which has lasted to its deadline without a notice, wasn't needed."""
    test = _test_around(frame.f_code.co_filename, frame.f_lineno) if is_product(frame) else None
    if test is None or any(name in frame.f_locals for name in test.callees):
        return
    world = kernel.the_world
    assert world is not None
    now_s, pauses = world.now_s, world._pauses_left
    world.now_s, world._pauses_left = began_s, kernel.NEVER
    try:
        is_waiting = eval(test.code, frame.f_globals, dict(frame.f_locals))
    finally:
        world.now_s, world._pauses_left = now_s, pauses
    if not is_waiting:
        note(frame, began_s)


def note(frame: FrameType, began_s: float) -> None:
    """Note a wait that nobody has ended, though what it was for was there."""
    world = kernel.the_world
    assert world is not None
    code = frame.f_code
    place = f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
    waited_s = world.now_s - began_s
    world.fail(AssertionError(f"waited {waited_s:.3f} s in {place} for what was there, and got no notice of it"))


class _Test:
    """What is asked before a wait."""

    def __init__(self, text: str) -> None:
        test = ast.parse(text, mode="eval")
        self.code = compile(test, "<what a wait is for>", "eval")
        self.callees = [
            node.func.id for node in ast.walk(test) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]
        """Functions that it calls by plain names."""


@functools.cache
def _test_around(path: str, line: int) -> _Test | None:
    """The test of the `if` or `while` in whose block a line is. None: it isn't in one, or the test takes several lines.

    It reads no more than it needs: each seed is a process that looks for itself.
    """
    lines = linecache.getlines(path)
    indent = _indent(lines[line - 1])
    above = next(text for text in lines[line - 2 :: -1] if text.strip() and _indent(text) < indent)
    found = re.fullmatch(r" *(?:if|while) (.*):\n?", above)
    return None if found is None else _Test(found[1])


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())
