"""A rank's membership in a group of ranks that share experts. The group can change while requests run."""

from __future__ import annotations

from raycore.engine.part import EnginePart, PartedEngine
from raycore.engine.scheduling import num_turns
from raycore.worker.rank import Regrouping


class ExpertGroup(EnginePart):
    """The group that one rank belongs to. A rank that shares no experts never changes its group."""

    def __init__(self, engine: PartedEngine, *, is_new: bool) -> None:
        """`is_new`: whether the rank has yet to join its first group, from which its workers get their weights."""
        self._engine = engine
        self._is_new = is_new

    def regroup(self, regrouping: Regrouping, *, stays: bool) -> None:
        """Join another group with the workers. Those of a rank that is new then allocate the cache."""
        engine = self._engine
        engine.executor.regroup(regrouping, engine.config)
        if not stays:
            return
        if self._is_new:
            engine.memory.allocate_cache()
        elif regrouping.num_ranks > regrouping.num_ranks_before:
            engine.executor.collective_rpc("accompany_warm_up")
        engine.scheduler.take_turns(num_turns(engine.config))
        self._is_new = False
