"""Programs and commands in an environment that lacks packages."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_HIDING = """\
import sys

sys.modules.update(dict.fromkeys({modules!r}))
"""


def without_packages(folder: Path, modules: Iterable[str]) -> dict[str, str]:
    """Return the environment of processes that can't import these modules. Their own child processes can't, either.

    `folder`: an empty one, for Python's file that each process runs first.
    """
    # to Python's import system, a module that is None in sys.modules isn't installed
    (folder / "sitecustomize.py").write_text(_HIDING.format(modules=list(modules)))
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
