"""How much memory this process has."""

from __future__ import annotations

from pathlib import Path


def anonymous_bytes() -> int:
    """Resident memory that isn't a file's: of files' pages, the kernel may reclaim some at any time."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10
