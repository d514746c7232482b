"""A pytest plugin: collections of garbage don't interrupt `ast.parse`.

CPython 3.11 counts the depth of the tree that it builds in a variable that all calls share, until 3.11.8
(https://github.com/python/cpython/issues/106905). A collection in the middle of it may run Python code, such as
`gc.callbacks`, and then other threads. If one parses, too, as each does that formats a traceback, the first call fails
with "AST constructor recursion depth mismatch".
"""

from __future__ import annotations

import ast
import gc
import sys
import threading
from functools import wraps
from typing import Any

HAS_FAULT = (3, 11) <= sys.version_info < (3, 11, 8)


def pytest_configure() -> None:
    if HAS_FAULT:
        ast.parse = whole(ast.parse)


def whole(parse: Any) -> Any:
    """`parse` without collections. It then holds the interpreter's lock while it builds a tree."""
    lock = threading.RLock()  # another thread's end doesn't allow collections again

    @wraps(parse)
    def parse_whole(*args: Any, **options: Any) -> Any:
        with lock:
            was_enabled = gc.isenabled()
            gc.disable()
            try:
                return parse(*args, **options)
            finally:
                if was_enabled:
                    gc.enable()

    return parse_whole
