"""Which instructions the processor has."""

from __future__ import annotations

import re
from pathlib import Path

CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
"""Names of features of x86 and ARM processors that decide which kernels libraries use."""


def describe_cpu(cpuinfo: str) -> tuple[str, list[str]]:
    """The CPU's model name, and which of `CPU_FEATURES` it has. `cpuinfo`: the text of /proc/cpuinfo."""
    model = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    found = features_of(cpuinfo)
    return model.group(1) if model else "unknown", [name for name in CPU_FEATURES if name in found]


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
