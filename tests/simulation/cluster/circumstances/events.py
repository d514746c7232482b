"""Engines with KV events. They leave no process: `accounts.connectors` follows them in there."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.cluster.circumstances.circumstance import Circumstance

CONFIG = {"enable_kv_cache_events": True, "publisher": "null"}


def drawn(draw: random.Random, options: Mapping[str, Any]) -> Circumstance:
    return Circumstance({"kv_events_config": CONFIG})
