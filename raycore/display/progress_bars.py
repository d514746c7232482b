"""Progress bars: widgets in a notebook that has ipywidgets, text on a terminal, and few lines in a log.

Import this module before any module of Ray, because this module silences Ray's message about missing ipywidgets.
"""

from __future__ import annotations

import io
import logging
import sys
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeAlias

from tqdm import TqdmWarning

with warnings.catch_warnings():
    # tqdm warns if ipywidgets is missing, but text bars are good enough
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

logging.getLogger("ray.widgets").setLevel(logging.WARNING)

BAR_S = 0.2
"""Interval between redraws of a progress bar, in seconds."""

LOG_S = 10.0
"""In a log, a bar writes at most one line in so many seconds, and none before."""

LOADING_BAR_DELAY_S = 1.0
"""An engine's start that takes fewer seconds than this shows no bar."""

RequestBar: TypeAlias = "tqdm[Any]"


def make_bar(is_shown: bool | Callable[..., tqdm[Any]], **options: Any) -> tqdm[Any]:
    """Return a progress bar. `options`: those of tqdm.

    `is_shown`: whether it is visible, or what makes it of the options instead of tqdm.
    """
    if callable(is_shown):
        return is_shown(**options)
    file = None if not is_shown or _is_redrawn() else _LogLines()
    return tqdm(disable=not is_shown, file=file, **options)


def _is_redrawn() -> bool:
    """Whether what is written can be overwritten: on a terminal and in a notebook, but not in the log of a job."""
    ipython = sys.modules.get("IPython")
    is_terminal = hasattr(sys.stderr, "isatty") and sys.stderr.isatty()  # a program may have put a logger there
    return is_terminal or (ipython is not None and ipython.get_ipython() is not None)


class _LogLines(io.TextIOBase):
    """The file of a bar in a log. Takes what the bar draws, and writes some of it as lines."""

    def __init__(self) -> None:
        self._written_s = time.monotonic()

    def write(self, text: str) -> int:
        drawn, now_s = text.strip(), time.monotonic()
        if drawn and now_s - self._written_s >= LOG_S:
            self._written_s = now_s
            print(drawn, file=sys.stderr, flush=True)
        return len(text)


class LoadingBar:
    """The progress bar of an engine's start, in percent of the weights."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar

    def show(self, fraction: float) -> None:
        """Redraw the bar. `fraction`: the fraction of the weights that has been read, 0 to 1."""
        self._bar.update(round(100 * fraction) - self._bar.n)


@contextmanager
def loading_bar(is_shown: bool) -> Generator[LoadingBar, None, None]:
    """Show the progress bar of an engine's start while the block runs. The bar disappears when the block ends."""
    with make_bar(
        is_shown,
        total=100,
        desc="Loading",
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}",
        delay=LOADING_BAR_DELAY_S,
        miniters=0,  # redraw without progress, too: the elapsed time has changed
        leave=False,
    ) as bar:
        yield LoadingBar(bar)


def request_bar(total: int, is_shown: bool | Callable[..., tqdm[Any]], work: str = "Generating") -> RequestBar:
    """A progress bar that counts finished requests: see `make_bar`. `work`: what is done with them."""
    return make_bar(is_shown, total=total, desc=work, unit="request")
