"""Shows the progress of a batch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from raycore.display.progress_bars import make_bar
from raycore.server.batch.files import Result


@dataclass
class Tally:
    """Counts of the lines of a batch."""

    num_lines: int
    num_before: int
    """Lines that an earlier run completed."""
    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    """Of outputs, or of prompts that were pooled."""
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
            self.num_tokens += _num_tokens(result.response.body)

    def __str__(self) -> str:
        counts = f"{self.num_done} done, {self.num_failed} failed, {self.num_before} skipped (already done)"
        return f"{counts}, {self.num_left} left; run the command again to continue" if self.num_left else counts


def _num_tokens(body: dict[str, Any]) -> int:
    """How many tokens a response's output has, or the prompts that were pooled. Each API has names of its own."""
    used = body["usage"] if "usage" in body else body["meta"]["billed_units"]
    generates = "choices" in body or "output" in body
    names = ("completion_tokens", "output_tokens") if generates else ("prompt_tokens", "input_tokens")
    return sum(used.get(name, 0) for name in names)


class BatchProgress:
    """Shows a progress bar."""

    def __init__(self, tally: Tally, is_silent: bool) -> None:
        self._tally = tally
        self._started_s = time.monotonic()
        self._bar = make_bar(
            not is_silent, total=tally.num_lines, initial=tally.num_before, desc="Batch", unit="request"
        )

    def show(self) -> None:
        """Update the display after the tally has changed."""
        if not self._bar.disable:
            speed = self._tally.num_tokens / (time.monotonic() - self._started_s)
            self._bar.set_postfix_str(f"{self._tally.num_failed} failed, {speed:.1f} tokens/s", refresh=False)
            self._bar.update()

    def __enter__(self) -> BatchProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
