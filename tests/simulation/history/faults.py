"""Faults that were mended long ago, and how they come back: texts of today's sources, and what takes their place.

A file `COMMIT.yaml` for each, named for the commit that mended it:

    subject: of that commit
    brings_back: what goes wrong again
    changes:
    - file: raycore/cluster/supervisor.py
      from: |
        if monitor.is_serving and not monitor.has_given_up:
      to: |
        if monitor.is_serving:

Texts are whole lines, and there is exactly one such place in the file. How far they are indented doesn't matter. So a
change applies as long as just these lines are there, wherever they are. A fault that can't come back has `impossible`,
with the reason, instead of `changes`.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

HERE = Path(__file__).parent


class DoesNotApply(Exception):
    """The sources have changed where a fault was to be put back."""


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"before": "from", "after": "to"}):
    """A text in one file, and what takes its place."""

    file: str
    before: str
    after: str

    def apply(self, root: Path) -> None:
        """Make the change. Raises DoesNotApply, with the file as it was."""
        place, lines = self.place(root), (root / self.file).read_text().splitlines()
        first = lines[place.start]
        new = textwrap.indent(textwrap.dedent(self.after), first[: len(first) - len(first.lstrip())])
        (root / self.file).write_text(
            "\n".join([*lines[: place.start], *new.splitlines(), *lines[place.stop :]]) + "\n"
        )

    def place(self, root: Path) -> range:
        """The lines that change, counted from 0. Raises DoesNotApply."""
        path = root / self.file
        if not path.is_file():
            raise DoesNotApply(f"{self.file} is gone")
        lines, old = path.read_text().splitlines(), textwrap.dedent(self.before).splitlines()
        found = [at for at in range(len(lines) - len(old) + 1) if _is_at(lines, at, old)]
        if len(found) != 1:
            what = "nowhere" if not found else f"{len(found)} times"
            raise DoesNotApply(f"{self.file} has {what}:\n{textwrap.indent(self.before.rstrip(), '    ')}")
        return range(found[0], found[0] + len(old))


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the files: see the module."""

    subject: str
    brings_back: str = ""
    changes: tuple[Change, ...] = ()
    impossible: str = ""
    """Why the fault can't come back."""

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Put the fault into the sources under `root`, as long as the context lasts. Raises DoesNotApply."""
        paths = {root / change.file for change in self.changes}
        before = [(path, path.read_bytes(), path.stat()) for path in paths if path.is_file()]
        try:
            for change in self.changes:
                change.apply(root)
            yield
        finally:
            for path, data, stat in before:
                path.write_bytes(data)
                os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # what Python has compiled is right again


def known() -> list[str]:
    """The commits whose faults are described."""
    return sorted(path.stem for path in HERE.glob("*.yaml"))


def read(commit: str) -> Fault:
    """The fault that a commit has mended. Raises msgspec.ValidationError if the file is none."""
    return msgspec.yaml.decode((HERE / f"{commit}.yaml").read_bytes(), type=Fault)


def _is_at(lines: Sequence[str], at: int, wanted: Sequence[str]) -> bool:
    """Whether these lines are there, as far indented as they like."""
    return textwrap.dedent("\n".join(lines[at : at + len(wanted)])).splitlines() == list(wanted)
