"""Reads profiles' files, which are in Chrome's trace format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple


class Trace(NamedTuple):
    """A profile's file."""

    origin_ns: int
    calls: list[dict[str, Any]]
    """The calls, with a beginning and a duration."""

    @property
    def names(self) -> set[str]:
        return {call["name"] for call in self.calls}

    def of(self, name: str) -> list[dict[str, Any]]:
        return [call for call in self.calls if call["name"] == name]

    def beginning_with(self, start: str) -> list[str]:
        return [call["name"] for call in self.calls if call["name"].startswith(start)]

    def lies_within(self, inner: str, outer: str) -> bool:
        """Whether every call `inner` lies within a call `outer`."""
        spans = [(call["ts"], call["ts"] + call["dur"]) for call in self.of(outer)]
        return all(
            any(start <= call["ts"] and call["ts"] + call["dur"] <= end for start, end in spans)
            for call in self.of(inner)
        )


def read_trace(path: Path) -> Trace:
    text = path.read_bytes()
    found = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)
    calls = [event for event in found["traceEvents"] if event.get("ph") == "X"]
    return Trace(found["baseTimeNanoseconds"], calls)
