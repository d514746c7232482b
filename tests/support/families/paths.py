"""Toys of families whose hidden states take another path through a layer than Llama's. See `FAMILIES`."""

from __future__ import annotations

from families.toy import Toy

PATHS: dict[str, Toy] = {}
