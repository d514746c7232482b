"""Headers of requests to the model."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header

DataParallelRank = Annotated[int | None, Header(alias="X-data-parallel-rank", ge=0)]
"""The data-parallel rank that runs the request. Without this header, the server chooses a rank."""
