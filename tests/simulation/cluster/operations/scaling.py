"""Changes of the number of ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from placement.errors import PlacementShortage
from raycore.errors import InvalidRequest
from simulation.cluster.operations.conditions import updating
from simulation.cluster.operations.contract import Capability, History, operation
from simulation.cluster.records import Deed, Record
from simulation.scenario import Operation


class Scaling(Capability):
    """See the module."""

    kinds = ("scale", "scale_elastic_ep")
    weight = 2
    within_s = 1900.0
    """A rank that starts has 600 s."""

    def draw(self, draw: random.Random, at_s: float, options: Mapping[str, Any]) -> list[Operation]:
        num_ranks = options["data_parallel_size"]
        first, later = draw.randint(1, num_ranks + 1), at_s + draw.uniform(0.0, 1.5)
        made = [operation(at_s, "scale", data_parallel_size=first)]
        if draw.random() < 0.3:  # such as down and up again
            made.append(
                operation(later, "scale", data_parallel_size=draw.randint(1, num_ranks + 1), drain_timeout_s=0.1)
            )
        return made

    def refuses(self, deed: Deed, history: History) -> bool | None:
        """Ranks that share experts can't move them while these change. A server of one rank can't get others."""
        if history.options.get("data_parallel_external_lb"):
            return deed.operation.arguments["data_parallel_size"] != 1
        shares = history.options.get("enable_expert_parallel")
        return None if shares and updating(history).may_hold(history, deed) else False

    def fails(self, deed: Deed, record: Record, error: BaseException) -> bool:
        """The rank that it names has gone for good."""
        return "rank" in record.request.wants and isinstance(error, InvalidRequest)

    def excuses(self, deed: Deed, error: BaseException, history: History) -> bool:
        # whether there is room depends on the nodes, and on what else runs there
        return isinstance(error, PlacementShortage) or super().excuses(deed, error, history)
