"""Caches elsewhere of models whose layers have windows, or keep states: in the host's memory, in files, and on other
ranks."""

from __future__ import annotations

import random
from dataclasses import replace

from simulation.cluster.deployments import models, offload, peers
from simulation.cluster.deployments.deployment import Deployment


def drawn(draw: random.Random) -> Deployment:
    made = draw.choice([offload.drawn, peers.drawn])(draw)
    return replace(made, options=made.options | models.with_windows(draw))


def drawn_with_states(draw: random.Random) -> Deployment:
    made = draw.choice([offload.drawn, peers.drawn])(draw)
    return replace(made, options=made.options | models.with_states(draw))
