"""Which instructions the processor has."""

from __future__ import annotations

import re
from pathlib import Path


def features_of(cpuinfo: str) -> frozenset[str]:
    """Return the names of the processor's features, in Linux's spelling. `cpuinfo`: the text of /proc/cpuinfo."""
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", cpuinfo, re.MULTILINE)
    return frozenset(flags.group(1).split()) if flags else frozenset()


def cpu_features(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the features of this machine's processor. Empty if they aren't known, as on macOS."""
    try:
        return features_of(path.read_text())
    except OSError:
        return frozenset()
