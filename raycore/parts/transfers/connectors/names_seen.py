"""Which engines share a directory of embeddings, so that one that finds nothing there can say why.

Whoever saves embeddings leaves a note of a line in the directory, which says what their names are made of. An engine
that only loads them, and misses one, compares the notes with its own.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from raycore.system import time

logger = logging.getLogger(__name__)

_FRESH_S = 600.0
"""Older notes are of engines that may have ended."""
_AGAIN_S = 60.0
"""After so long, a note is written again."""


class NamesSeen:
    """One worker's view of the notes. No directory: it neither writes nor reads any."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._written: tuple[str, float] = "", 0.0
        """The last note, and when it has to be written again."""
        self._has_warned = False

    def saved(self, maker: str) -> None:
        """Note that embeddings were saved under names that begin with `maker`."""
        written, due_s = self._written
        if self._directory is None or (written == maker and time.monotonic() < due_s):
            return
        self._written = maker, time.monotonic() + _AGAIN_S
        with suppress(OSError):  # that embeddings can't be written is logged already
            (self._directory / f"{blake2b(maker.encode(), digest_size=8).hexdigest()}.names").write_text(maker)

    def missed(self, maker: str) -> None:
        """Warn, once, if others save embeddings, and none of them under names that begin with `maker`."""
        if self._directory is None or self._has_warned:
            return
        found: list[str] = []
        with suppress(OSError):
            files = self._directory.glob("*.names")
            found = [file.read_text() for file in files if time.time() - file.stat().st_mtime < _FRESH_S]
        if found and maker not in found:
            self._has_warned = True
            logger.warning(
                "embeddings of images in %s aren't used, because they have other names, so images are encoded here, "
                "too. They are of (%s), and this engine's of (%s)",
                self._directory,
                "), (".join(sorted(found)),
                maker,
            )
