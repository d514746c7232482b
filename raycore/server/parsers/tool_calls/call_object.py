"""Reads the JSON object of a call, whose keys may have any order, in text that arrives in pieces. Pure."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

from raycore.server.parsers.tool_calls.base import is_name
from raycore.server.parsers.tool_calls.json_scanner import JsonScanner

_KEY = re.compile(r'\s*([{,])\s*("(?:[^"\\]|\\.)*")\s*:\s*(?=\S)', re.DOTALL)
_KEY_BEGUN = re.compile(r'\s*(?:[{,]\s*(?:"(?:[^"\\]|\\.)*(?:\\|"\s*:?\s*)?)?)?', re.DOTALL)
_END = re.compile(r"\s*\}")
_ARGUMENTS = ("arguments", "parameters")


class Found(Enum):
    """What `CallObject.advance` has found in the text."""

    ARGUMENTS = "the name, and the beginning of an object that is the arguments"
    CALL = "the name and the whole arguments"
    END = "the end of the object, without a name or without arguments"
    NO_CALL = "something that can't be the object of a call"


class CallObject:
    """Reads an object with the keys `name` and `arguments` (or `parameters`), besides any others.

    The arguments are an object, or a string that contains the JSON of an object. The first value of a key counts.
    """

    def __init__(self, position: int) -> None:
        """`position`: where the object begins in the text."""
        self.position = position
        """Up to where the text has been read."""
        self.first_key: str | None = None
        self.name: str | None = None
        self.arguments: str | None = None
        """The JSON of the arguments, if they are complete."""
        self._key = ""
        self._value: JsonScanner | None = None

    def advance(self, text: str) -> Found | None:
        """Read on. `text` is the whole text so far. Returns None if more text is needed.

        After `Found.ARGUMENTS`, the arguments begin at `position`. Otherwise, the text has been read up to there.
        """
        while True:
            found = self._read_key(text) if self._value is None else self._read_value(text, self._value)
            if found is not True:
                return found or None

    def _read_key(self, text: str) -> Found | bool:
        """Read a key. Returns whether it is complete, or what has been found."""
        key = _KEY.match(text, self.position)
        if key is None:
            end = _END.match(text, self.position)
            if end is not None and self.first_key is not None:
                self.position = end.end()
                return Found.END
            return Found.NO_CALL if _KEY_BEGUN.fullmatch(text, self.position) is None else False
        name = _parsed(key[2])
        if not isinstance(name, str) or (key[1] == "{") != (self.first_key is None):
            return Found.NO_CALL
        self.first_key = name if self.first_key is None else self.first_key
        self._key = name
        self.position = key.end()
        if name in _ARGUMENTS and self.name is not None and text[self.position] == "{":
            return Found.ARGUMENTS
        self._value = JsonScanner(self.position, strict=True)
        return True

    def _read_value(self, text: str, value: JsonScanner) -> Found | bool:
        """Read a key's value. Returns whether it is complete, or what has been found."""
        if not value.advance(text):
            return False
        written = text[self.position : value.position]
        if value.is_broken or not written or not self._keep(written):
            return Found.NO_CALL
        self.position = value.position
        self._value = None
        return True if self.name is None or self.arguments is None else Found.CALL

    def _keep(self, value: str) -> bool:
        """Keep a value if it belongs to the call. Returns whether the object may still be that of a call."""
        if self._key == "name" and self.name is None:
            name = _parsed(value)
            self.name = name if is_name(name) else None
            return self.name is not None
        if self._key in _ARGUMENTS and self.arguments is None:
            given = _parsed(value)
            if isinstance(given, str):
                value = given.strip() or "{}"
                given = _parsed(value)
            self.arguments = value if isinstance(given, dict) else None
            return self.arguments is not None or value == "null"
        return True


def _parsed(text: str) -> Any:
    """The value of a JSON text; None if the text isn't JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
