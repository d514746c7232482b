"""Shows the progress of a batch: as a bar on a terminal, as lines in a log."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from raycore.server.batch.files import Result

_REPORT_S = 10.0
"""Minimum interval between progress lines in a log, in seconds."""


@dataclass
class Tally:
    """Counts of the lines of a batch."""

    num_lines: int
    num_before: int
    """Lines that an earlier run completed."""
    num_done: int = 0
    num_failed: int = 0
    num_output_tokens: int = 0
    is_begun: bool = False

    @property
    def num_left(self) -> int:
        """Lines without a result."""
        return self.num_lines - self.num_before - self.num_done - self.num_failed

    def note(self, result: Result) -> None:
        """Count a result."""
        if result.error is not None or result.response is None:
            self.num_failed += 1
        else:
            self.num_done += 1
            self.num_output_tokens += result.response.body["usage"]["completion_tokens"]

    def __str__(self) -> str:
        counts = f"{self.num_done} done, {self.num_failed} failed, {self.num_before} skipped (already done)"
        return f"{counts}, {self.num_left} left; run the command again to continue" if self.num_left else counts


class Progress:
    """Shows a progress bar if stderr is a terminal, and otherwise prints a line every 10 seconds at most."""

    def __init__(self, tally: Tally, is_silent: bool) -> None:
        self._tally = tally
        self._started_s = self._reported_s = time.monotonic()
        self._logs = not is_silent and not sys.stderr.isatty()
        self._bar: tqdm[Any] = tqdm(
            total=tally.num_lines,
            initial=tally.num_before,
            desc="Batch",
            unit="request",
            disable=is_silent or self._logs,
        )

    def show(self) -> None:
        """Update the display after the tally has changed."""
        now_s, tally = time.monotonic(), self._tally
        speed = f"{tally.num_output_tokens / (now_s - self._started_s):.1f} tokens/s"
        if not self._bar.disable:
            self._bar.set_postfix_str(f"{tally.num_failed} failed, {speed}", refresh=False)
            self._bar.update()
        elif self._logs and now_s - self._reported_s >= _REPORT_S:
            self._reported_s = now_s
            num_ended = tally.num_lines - tally.num_left
            ended = f"{num_ended} of {tally.num_lines} requests finished, {tally.num_failed} of them failed"
            print(f"raycore: {ended}, {speed}", file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
