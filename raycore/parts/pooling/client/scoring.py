"""Which pairs of texts are scored. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from raycore.errors import InvalidRequest
from raycore.json_fields import shortened


def paired(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Return two lists of texts of the same length: one text with each of several, or several with as many.

    Raises:
        InvalidRequest: an argument has no text, or the numbers don't fit.
    """
    first, second = _texts("data_1", data_1), _texts("data_2", data_2)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidRequest(
            f"{len(first)} texts can't be paired with {len(second)}: give one and any number, or as many of each"
        )
    return first, second


def _texts(name: str, given: object) -> list[str]:
    items = [given] if isinstance(given, str) else given
    if not isinstance(items, Sequence) or not items:
        raise InvalidRequest(f"{name}={shortened(given)} isn't a text or a list of texts")
    for item in cast("Sequence[Any]", items):
        if not isinstance(item, str) or not item:
            raise InvalidRequest(f"{name} has {shortened(item)}, which isn't a text, or is empty")
        try:
            item.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{name} has a text with half of a surrogate pair") from None
    return list(cast("Sequence[str]", items))
