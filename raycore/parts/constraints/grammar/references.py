"""Finds what the references of a JSON schema point to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import unquote, urljoin

from raycore.errors import InvalidRequest

_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas, whatever they look like."""
_MAX_POINTERS = 16 << 20
"""Many parts below a long key would take more memory than there is."""


def escaped(part: str) -> str:
    """A part of a JSON pointer."""
    return part.replace("~", "~0").replace("/", "~1")


class References:
    """The references of one schema. References to other documents are refused: nothing is downloaded."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._bases: dict[str, str] = {}
        """The URIs of the schemas that have an `$id`, by their pointers."""
        self._pointers = {"": ""}
        """The pointers of the schemas that have an `$id` or an anchor, by their URIs."""
        self._is_read = False
        self._ends: dict[str, tuple[str, Any]] = {}
        """What the schemas that are nothing but references lead to, by their pointers."""

    def resolve(self, reference: str, path: str) -> tuple[str, Any]:
        """(pointer, schema) that a `$ref` at `path` points to, through other schemas that are nothing but references.

        The pointer has one form only, so that equal targets have equal pointers. It is empty for the whole schema.
        """
        if not self._is_read:
            self._read_names()
        seen: set[str] = set()
        while True:
            pointer, target = found = self._target(reference, path)
            if pointer in self._ends:
                found = self._ends[pointer]
                break
            following = cast("dict[str, Any]", target)["$ref"] if _is_reference(target) else None
            if not isinstance(following, str):
                break
            if pointer in seen:
                raise InvalidRequest(f"#{path}: $ref {reference!r} leads to nothing but references")
            seen.add(pointer)
            reference, path = following, f"{pointer}/$ref"
        self._ends.update(dict.fromkeys(seen, found))
        return found

    def _target(self, reference: str, path: str) -> tuple[str, Any]:
        base = self._base_of(path)
        uri, _, fragment = (base + reference if reference.startswith("#") else urljoin(base, reference)).partition("#")
        is_anchor = fragment[:1] not in ("", "/")
        start = self._pointers.get(f"{uri}#{fragment}" if is_anchor else uri)
        inner = "" if is_anchor or fragment == "/" else unquote(fragment)
        parts = [part.replace("~1", "/").replace("~0", "~") for part in f"{start}{inner}".split("/")[1:]]
        value = None if start is None else self._root
        for part in parts:
            value = _child(value, part)
        if value is None:
            raise InvalidRequest(
                f"#{path}: $ref {reference!r} points to nothing in this schema; retrieving it failed, because other "
                "documents aren't read"
            )
        return "".join(f"/{escaped(part)}" for part in parts), value

    def _base_of(self, path: str) -> str:
        """The URI of the innermost schema around `path` that has an `$id`; empty without one."""
        while path and path not in self._bases:
            path = path.rpartition("/")[0]
        return self._bases.get(path, "")

    def _read_names(self) -> None:
        waiting: list[tuple[Any, str, str]] = [(self._root, "", "")]
        num_characters = 0
        while waiting:
            value, pointer, base = waiting.pop()
            if isinstance(value, dict):
                value = cast("dict[str, Any]", value)
                base = self._read_name(value, pointer, base)
                inner: list[tuple[Any, str]] = [(each, escaped(key)) for key, each in value.items() if key not in _DATA]
            else:
                items = cast("list[Any]", value) if isinstance(value, list) else []
                inner = [(each, str(number)) for number, each in enumerate(items)]
            for each, part in inner:
                if _has_parts(each):
                    num_characters += len(pointer) + len(part)
                    if num_characters > _MAX_POINTERS:
                        raise InvalidRequest(
                            f"the pointers to all parts of the schema have more than {_MAX_POINTERS:,} characters: "
                            "shorten its keys, or leave out $ref"
                        )
                    waiting.append((each, f"{pointer}/{part}", base))
        self._is_read = True

    def _read_name(self, schema: Mapping[str, Any], pointer: str, base: str) -> str:
        """Note a schema's `$id` and anchors. Returns the base URI of the references in it."""
        own: Any = schema.get("$id")
        anchors: list[Any] = [schema.get("$anchor"), schema.get("$dynamicAnchor")]
        if isinstance(own, str):
            own, _, anchor = own.partition("#")  # draft 6 and 7 write anchors so
            anchors.append(anchor or None)
            if own:
                base = self._bases[pointer] = urljoin(base, own)
                self._pointers[base] = pointer
        self._pointers |= {f"{base}#{anchor}": pointer for anchor in anchors if isinstance(anchor, str)}
        return base


def _is_reference(schema: Any) -> bool:
    return isinstance(schema, dict) and cast("dict[str, Any]", schema).keys() == {"$ref"}


def _has_parts(value: Any) -> bool:
    return isinstance(value, (dict, list))


def _child(value: Any, part: str) -> Any:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).get(part)
    items = cast("list[Any]", value) if isinstance(value, list) else []
    return items[int(part)] if part.isdecimal() and len(part) < 9 and int(part) < len(items) else None
