"""Progress bars: widgets in a notebook that has ipywidgets, text everywhere else.

Import this module before any module of Ray, because this module silences Ray's message about missing ipywidgets.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
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

LOADING_BAR_DELAY_S = 1.0
"""An engine's start that takes fewer seconds than this shows no bar."""

RequestBar: TypeAlias = "tqdm[Any]"


class LoadingBar:
    """The progress bar of an engine's start, in percent of the weights."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar

    def show(self, share: float) -> None:
        """Redraw the bar. `share`: the share of the weights that has been read, 0 to 1."""
        self._bar.update(round(100 * share) - self._bar.n)


@contextmanager
def loading_bar(is_shown: bool) -> Generator[LoadingBar, None, None]:
    """Show the progress bar of an engine's start while the block runs. The bar disappears when the block ends."""
    with tqdm(
        total=100,
        desc="Loading",
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}",
        disable=not is_shown,
        delay=LOADING_BAR_DELAY_S,
        miniters=0,  # redraw without progress, too: the elapsed time has changed
        leave=False,
    ) as bar:
        yield LoadingBar(bar)


def request_bar(total: int, is_shown: bool) -> RequestBar:
    """A progress bar that counts finished requests."""
    return tqdm(total=total, desc="Generating", unit="request", disable=not is_shown)
