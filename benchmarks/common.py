"""What the benchmarks share: children that report one JSON object, and medians."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

MARK = "@result "
"""A child's lines that begin so hold its report; everything else it prints is its own affair."""


def report(**fields: Any) -> None:
    """In a child: report `fields`."""
    print(MARK + json.dumps(fields), flush=True)


def run_child(
    python: str,
    script: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 900.0,
) -> dict[str, Any]:
    """Run `script` (source text) with `python` and return its reports merged, with `launched` (seconds, wall clock).

    Raises RuntimeError with the end of what the child printed when it fails or reports nothing.
    """
    launched = time.time()
    child = subprocess.run(
        [python, "-c", script, *arguments],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    fields: dict[str, Any] = {"launched": launched}
    for line in child.stdout.splitlines():
        if MARK in line:
            fields |= json.loads(line[line.index(MARK) + len(MARK) :])
    if child.returncode or len(fields) == 1:
        raise RuntimeError(f"the child ended with {child.returncode}:\n{child.stdout[-3000:]}")
    return fields


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def table(rows: Sequence[Sequence[object]]) -> str:
    """`rows`, the first of which is the header, as aligned text."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(texts[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in texts)


def this_python() -> str:
    """The interpreter that runs raycore."""
    return sys.executable
