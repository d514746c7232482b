"""The fields of a request that the server ignores: those that it doesn't know, and hints that it can't follow.

Clients send such fields to servers that ignore them, too. A response names them in a header, so that none is silently
without effect. With the option `strict_fields`, they are errors.

The fields belong to the request that the current context handles. Whoever handles a request opens it with `noting()`.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from urllib.parse import quote

from raycore.server.options import ServerOptions

logger = logging.getLogger(__name__)

HEADER = "x-raycore-ignored-fields"

_MAX_NAMES = 20
"""Number of names in a header or a line of the log."""
_MAX_NAME = 100
"""Characters of a name."""
_MAX_LOGGED = 1000


class IgnoredFields:
    """The ignored fields of one request."""

    def __init__(self, is_strict: bool) -> None:
        self.is_strict = is_strict
        """Whether such fields are errors."""
        self.names: dict[str, None] = {}
        """In the order in which they were found. Those of a nested object follow its field and a dot."""

    @property
    def shown(self) -> str:
        """The names in ASCII, for a header or the log. What clients may not put there is escaped as in URLs."""
        shown = [quote(name[:_MAX_NAME], errors="replace") for name in list(self.names)[:_MAX_NAMES]]
        rest = len(self.names) - len(shown)
        return ", ".join([*shown, *([f"and {rest} more"] if rest else [])])


_current: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)

_logged: set[str] = set()
"""What was logged. A client sends the same fields with every request, and each line says the same."""


@contextmanager
def noting(options: ServerOptions) -> Generator[IgnoredFields, None, None]:
    """Note the fields that are ignored meanwhile, in this context."""
    fields = IgnoredFields(options.strict_fields)
    token = _current.set(fields)
    try:
        yield fields
    finally:
        _current.reset(token)


def ignore(name: str) -> bool:
    """Note that a field of the request is ignored. Returns False if it is an error instead."""
    fields = _current.get()
    if fields is None:
        return True
    if not fields.is_strict:
        fields.names[name] = None
    return not fields.is_strict


def log_ignored(where: str, fields: IgnoredFields) -> None:
    """Log the ignored fields of a request to `where`, unless the same line was logged before."""
    if not fields.names:
        return
    line = f"{where}: ignored the fields {fields.shown}, which this server doesn't follow (said once)"
    if line not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(line)
        logger.warning("%s", line)
