"""Prompts whose pieces come minutes apart, in engines that may be given up meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from simulation.cluster.kinds.pieces import Pieces
from simulation.scenario import Fault, Moment, Request


class _SlowPieces(Pieces):
    name = "slow pieces"
    engine_share = 0.2
    excludes = (*Pieces.excludes, "pieces")

    def options(self, draw: random.Random, options: Mapping[str, Any]) -> dict[str, Any] | None:
        return {"max_rank_restarts": draw.choice([0, 0, 1])}

    def faults(self, draw: random.Random, requests: Iterable[Request], options: Mapping[str, Any]) -> list[Fault]:
        """All ranks end while callers wait for a piece."""
        moments = [request.at_s for request in requests if self.name in request.wants]
        if not moments or draw.random() < 0.5:
            return []
        at_s = round(draw.choice(moments) + draw.uniform(1.0, 10.0), 4)
        return [Fault(when=Moment(at_s), kind="kill engine") for _ in range(options["data_parallel_size"])]

    def delays(self, draw: random.Random) -> list[float]:
        return [0.0, round(draw.uniform(0.0, 2.0), 4), round(draw.uniform(30.0, 300.0), 4)]


KIND = _SlowPieces()
