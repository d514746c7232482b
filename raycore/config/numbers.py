"""Numbers that several options have: their ranges are part of their types."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Timeout = Annotated[float, Meta(gt=0)]
