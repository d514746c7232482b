"""Ranks that end as planned: they end their streams of outputs before they are killed."""

from __future__ import annotations

from typing import Any

from simulation.cluster.accounts.account import Account, Run
from simulation.cluster.faults import ENGINE
from simulation.ray.actors import Actor
from simulation.ray.gcs import Gcs

_OUTPUTS = "outputs"


class Ends(Account):
    """What ranks have under way when they are killed."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        global _account
        _account = self

    def killed(self, actor: Actor) -> None:
        """The program kills an actor."""
        run, incarnation = self.run, actor.incarnation
        if not run.is_unbroken or actor.class_name != ENGINE or incarnation is None or incarnation.process.has_ended:
            return
        group = incarnation._groups.get(_OUTPUTS)
        num_open = 0 if group is None else group._num_threads - len(group._idle)
        if num_open and not actor.is_dead:
            self.problems.append(f"nothing has broken, and {actor} has {num_open} open streams when it is killed")


_account: Ends | None = None
"""That of the present run."""
_original = Gcs.kill


def _kill(self: Gcs, actor: Actor, **how: Any) -> None:
    if _account is not None and _account.run.cluster.gcs is self:
        _account.killed(actor)
    _original(self, actor, **how)


Gcs.kill = _kill
