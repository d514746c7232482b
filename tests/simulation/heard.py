"""What raycore logs in a simulated world, whatever else is done with its logs.

Warnings and errors are kept. What an engine tells by itself has no line twice.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

from simulation import mistakes
from simulation.world import kernel


class Logged(NamedTuple):
    """A line of a log."""

    at_s: float
    who: str
    """The thread, with its process."""
    level: int
    said: str

    def __str__(self) -> str:
        return f"{self.who} logs: {self.said}"


class _Listener(logging.Handler):
    def __init__(self, logged: list[Logged]) -> None:
        super().__init__(logging.INFO)
        self._logged = logged

    def emit(self, record: logging.LogRecord) -> None:
        here = kernel.the_world
        if here is None:  # what is collected later
            return
        if record.levelno < logging.WARNING:
            _look_for_repeated_lines(here, record.getMessage())
            return
        self._logged.append(Logged(here.now_s, str(here.current), record.levelno, record.getMessage()))
        if record.exc_info:
            mistakes.note(record.exc_info[1], f"{here.current} logs {record.getMessage()!r}")


def _look_for_repeated_lines(here: kernel.World, said: str) -> None:
    """Errors may say a line twice, which others have said before. What an engine tells by itself doesn't."""
    lines = said.split("\n")
    if len(set(lines)) < len(lines):
        here.fail(AssertionError(f"a log has a line twice: {said}"))


@contextmanager
def heard() -> Generator[list[Logged], None, None]:
    """Hear what is logged while the block runs. Yields the lines, to which more are added. Nothing else gets them."""
    logger, logged = logging.getLogger("raycore"), list[Logged]()
    level, handlers, propagates = logger.level, logger.handlers, logger.propagate
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    logger.setLevel(logging.INFO)
    logger.handlers, logger.propagate = [_Listener(logged)], False
    try:
        yield logged
    finally:
        logger.setLevel(level)
        logger.handlers, logger.propagate = handlers, propagates
        logging.disable(disabled)
