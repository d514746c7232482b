"""How much memory this process has."""

from __future__ import annotations

from pathlib import Path


def resident_bytes() -> int:
    """Resident memory except pages of files, which the kernel may reclaim at any time. Shared memory counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
