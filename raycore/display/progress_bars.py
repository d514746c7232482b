"""Progress bars: widgets in a notebook that has ipywidgets, text everywhere else.

To be imported before anything of Ray's, which would otherwise be the first to tell a notebook that it lacks ipywidgets.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeAlias

from tqdm import TqdmWarning

with warnings.catch_warnings():
    # bars of text are good enough to say nothing
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

logging.getLogger("ray.widgets").setLevel(logging.WARNING)

BAR_S = 0.2
"""A progress bar is redrawn this often."""

LOADING_BAR_DELAY_S = 1.0
"""A start that is faster shows no bar."""

RequestBar: TypeAlias = "tqdm[Any]"


class LoadingBar:
    """The bar of a start: percent of the weights."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar

    def show(self, share: float) -> None:
        """Redraw with `share`, 0 to 1, of the weights read."""
        self._bar.update(round(100 * share) - self._bar.n)


@contextmanager
def loading_bar(is_shown: bool) -> Generator[LoadingBar, None, None]:
    """A bar that is gone when the block ends."""
    with tqdm(
        total=100,
        desc="Loading",
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}",
        disable=not is_shown,
        delay=LOADING_BAR_DELAY_S,
        miniters=0,  # the time that has passed is news, too
        leave=False,
    ) as bar:
        yield LoadingBar(bar)


def request_bar(total: int, is_shown: bool) -> RequestBar:
    """A bar that counts requests that have ended."""
    return tqdm(total=total, desc="Generating", unit="request", disable=not is_shown)
