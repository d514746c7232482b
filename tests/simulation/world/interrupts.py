"""Interrupts a process's main thread, as Ctrl-C does: while it waits, or before any statement of the product.

The modules that `everywhere` names say before each statement of theirs that they come to it. Python itself runs a
signal's handler where a function begins, where a loop goes on, and after a call, which are fewer places.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from simulation.world import kernel, statements
from simulation.world.kernel import Process, World

_PRODUCT = ("raycore.", "placement.")


class Interrupt:
    """One interrupt of a process, which has to have a handler of SIGINT."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._num_statements: int | None = None
        """How many statements are left before it strikes."""
        self._num_places: int | None = None
        self._delay_s = 0.0
        self._places: set[tuple[str, int]] = set()
        """Where the main thread has waited, since that counts."""
        self._is_over = False
        self.has_struck = False

    def after_statements(self, count: int) -> None:
        """Strike before the main thread runs this many more statements."""
        self._num_statements = count
        self._world.systems["interrupt"] = self

    def after_s(self, delay_s: float) -> None:
        """Strike after a virtual time: when the main thread next waits, or lets others run."""
        self._world.call_later(delay_s, self._strike)

    def at_place(self, number: int, delay_s: float) -> None:
        """Strike when the main thread has waited for a while at the `number`-th place of the product, from 1 on."""
        self._num_places, self._delay_s = number, delay_s
        self._world.on_wait = self._wait

    def _wait(self, thread: kernel.Thread) -> None:
        if thread is not self._process.main_thread or len(self._places) == self._num_places:
            return
        self._places.add(_place())
        if len(self._places) == self._num_places:
            self._world.call_later(self._delay_s, self._strike)

    def cancel(self) -> None:
        """Strike no more."""
        self._is_over = True

    def come_to_statement(self, thread: kernel.Thread) -> None:
        if self._num_statements is None or self._is_over or thread is not self._process.main_thread:
            return
        self._num_statements -= 1
        if self._num_statements <= 0:
            self._num_statements = None
            self._strike()
            self._world.handle_signals()

    def _strike(self) -> None:
        if not self._is_over and not self._process.has_ended:
            self._is_over = self.has_struck = True
            self._world.tell("is interrupted", self._process)
            self._world.interrupt(self._process, signal.SIGINT)


def _place() -> tuple[str, int]:
    """The innermost line of the product that runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_globals["__name__"].startswith(_PRODUCT):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def everywhere(packages: Sequence[str]) -> None:
    """From now on, modules of these packages are imported with a place to be interrupted before each statement."""
    statements.everywhere(packages, come_to_statement)


def come_to_statement() -> None:
    world = kernel.the_world
    if world is not None and world.current is not None and (interrupt := world.systems.get("interrupt")) is not None:
        interrupt.come_to_statement(world.current)
