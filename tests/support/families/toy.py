"""What a small random checkpoint is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Toy(NamedTuple):
    """A checkpoint of few and narrow layers, in which every setting that raycore reads has an effect."""

    config: str
    """A configuration class of transformers."""
    settings: Mapping[str, Any]
    """They are added to `SIZES` or replace them."""
    switches: Mapping[str, Any] = {}
    """Other values of keys of config.json, each of which changes what the model generates. Where a key is in an object
    in config.json, their names have a dot between them. Keys that only make sense together have a comma between them,
    and a tuple of values. `tests/unit/models/test_switches.py` turns one after the other."""
    is_plain: bool = False
    """Whether other toys have every part of it, so that few schedules show what config.json and the names of tensors
    may hide."""
