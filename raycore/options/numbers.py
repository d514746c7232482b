"""Numbers that several options have: their ranges are part of their types."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

_SCALES = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("kmgt", start=1)},
    **{unit: 1024**power for power, unit in enumerate("KMGT", start=1)},
}
_SHORT = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)")

MAX_SECONDS = 1e9
"""The longest time, 30 years, that a call may be asked to wait. The operating system and Ray refuse longer ones."""

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Timeout = Annotated[float, Meta(gt=0)]


def whole_number(value: int | str) -> int:
    """Convert a number of the short form that vLLM takes, too: 4k is 4000, 4K is 4096, and 1.5m is 1500000.

    Raises:
        TypeError: it isn't one, or isn't a whole number.
    """
    if not isinstance(value, str):
        return value
    found = _SHORT.fullmatch(value.strip())
    if found is None:
        raise TypeError(value)
    digits, unit = found.groups()
    number = float(digits) * _SCALES[unit] if "." in digits else int(digits) * _SCALES[unit]
    # as in vLLM, powers of 1024 take no fractions
    if number != int(number) or (unit.isupper() and "." in digits):
        raise TypeError(value)
    return int(number)
