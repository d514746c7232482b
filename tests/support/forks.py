"""Children that are forked from a test's process."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def in_child(check: Callable[[], None]) -> None:
    """Run `check` in a forked child, and fail if it fails there."""
    child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
