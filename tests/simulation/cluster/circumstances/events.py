"""Engines with KV events, which somebody follows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.cluster.circumstances.circumstance import Circumstance
from simulation.cluster.deployments.deployment import EVENTS


def drawn(draw: random.Random, options: Mapping[str, Any]) -> Circumstance:
    return Circumstance({"kv_events_config": EVENTS})
