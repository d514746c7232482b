"""What is said of one of vLLM's names, and the reasons that are written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

Status = Literal["same", "different", "refused"]


class Entry(NamedTuple):
    """One of vLLM's names."""

    key: str
    """Its area, a slash, and the name within the area: `http/ChatCompletionRequest.n`."""
    status: Status
    note: str = ""
    """How it differs, or why it is refused. Empty for what is the same, and as long as nobody has said why."""

    @property
    def name(self) -> str:
        """The name within the area."""
        return self.key.partition("/")[2]


class Explained(NamedTuple):
    """Entries with the reasons of the table, and what is wrong with the table."""

    entries: list[Entry]
    unexplained: list[str]
    """Keys of entries that differ or are refused without a reason."""
    stale: list[str]
    """Patterns of reasons that explain nothing."""


def explained(entries: Iterable[Entry], reasons: dict[str, str]) -> Explained:
    """Add the reasons to the entries that need one. The first pattern that matches an entry's key counts."""
    done: list[Entry] = []
    used: set[str] = set()
    for entry in entries:
        if entry.status != "same" and not entry.note:
            pattern = next((each for each in reasons if fnmatchcase(entry.key, each.replace("[", "[[]"))), None)
            if pattern is not None:
                used.add(pattern)
                entry = entry._replace(note=reasons[pattern])
        done.append(entry)
    unexplained = [entry.key for entry in done if entry.status != "same" and not entry.note]
    return Explained(done, unexplained, [pattern for pattern in reasons if pattern not in used])


def normal(value: Any) -> Any:
    """A default in the form in which defaults are compared: as JSON would have it."""
    if hasattr(value, "name") and hasattr(value, "value"):
        return value.name  # of an enumeration
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [normal(each) for each in value]
    if isinstance(value, frozenset | set):
        return [normal(each) for each in value]
    return value


def is_equal(theirs: Any, ours: Any) -> bool:
    """Whether two defaults mean the same. No list and no object mean the same as empty ones."""
    theirs, ours = normal(theirs), normal(ours)
    return theirs == ours or (not theirs and not ours and {type(theirs), type(ours)} <= {list, dict, type(None), str})


def shown(value: Any) -> str:
    """A default as the page shows it."""
    return f"`{normal(value)!r}`"
