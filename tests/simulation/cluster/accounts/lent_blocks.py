"""Blocks that ranks keep for others: no longer than these need them, and not while prompts of others lack blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from support.scheduler_parts import parts_of

from raycore.activity import RUNNING
from raycore.parts.transfers.connectors.peers.worker_side import Leases
from raycore.parts.transfers.scheduler.transfers import Transfers
from raycore.scheduler.scheduler import Scheduler
from simulation.cluster.accounts.account import Account, Run, ranks_of
from simulation.world import kernel
from simulation.world.kernel import Process

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

_LOOK_S = 0.5
"""Virtual seconds between two looks."""
_KEPT_S = 3.0
"""Virtual seconds that blocks may be kept that their reader has given back, by one message to whoever keeps them."""
_WAITS_S = 5.0
"""Virtual seconds that a prompt may wait for blocks that are only kept. The product keeps them for 1 s against others,
and the rank may have to wait for a worker's answer to a step. The leases that are drawn last for up to 30 s."""


class LentBlocks(Account):
    """Those of prompts that one rank computes for another."""

    settles_s = _WAITS_S

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        global _account
        _account = self
        self._returned: list[tuple[Process, Leases, str]] = []
        """Leases whose readers need them no more: by whom they are kept, and their names."""
        self._llm: AsyncLLM | None = None
        """None: no blocks are kept for others in this engine, or it isn't up."""
        self._since_s: dict[tuple[Process, str], float] = {}
        """What was wrong at the last look, by process: until when it may be."""

    def note(self, leases: Leases, names: Sequence[str]) -> None:
        """A reader gives leases back. On a thread of the process that has granted them."""
        current = self.run.cluster.world.current
        if current is not None:
            self._returned += [(current.process, leases, name) for name in names]

    def begin(self, llm: AsyncLLM) -> None:
        transfer: dict[str, Any] = self.run.scenario.options.get("kv_transfer_config") or {}
        if transfer.get("kv_connector") == "DisaggregationConnector":
            self._llm = llm
            self._watch()

    def _watch(self) -> None:
        llm = self._llm
        if llm is None:
            return
        now_s, before = self.run.cluster.world.now_s, self._since_s
        wrong = dict(self._wrong(llm)) if now_s >= self.run.faults.over_s else {}
        self._since_s = {key: before.get(key, now_s + limit_s) for key, limit_s in wrong.items()}
        late = [f"{process} {what}" for (process, what), until_s in self._since_s.items() if now_s > until_s]
        self.problems += late
        if not late:
            self.run.cluster.world.call_later(_LOOK_S, self._watch)

    def _wrong(self, llm: AsyncLLM) -> Iterator[tuple[tuple[Process, str], float]]:
        """What may not be for longer than so many seconds, by process."""
        for process, leases, name in self._returned:
            if name in leases._leases and not (process.has_ended or process.is_stopped):
                yield (process, f"keeps blocks of lease {name!r} that its reader has given back"), _KEPT_S
        for each in ranks_of(llm) if llm._manager.desired.now.activity == RUNNING else ():
            if _waits_for_lent(each.actor):
                yield (each.process, "has prompts that wait for blocks that it keeps for others"), _WAITS_S

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        for (process, what), _ in self._wrong(llm) if self._llm is not None else ():
            yield f"{process} {what}"

    def stopped(self, llm: AsyncLLM) -> Iterator[str]:
        self._llm = None
        return iter(())


def _waits_for_lent(rank: Any) -> bool:
    """Whether prompts wait in a rank that runs nothing and loads nothing, but keeps blocks for others."""
    core = rank._core
    if core is None or not isinstance(core.scheduler, Scheduler):
        return False
    scheduler = core.scheduler
    is_idle = not scheduler._slots.num_running and not scheduler._set_aside
    lends = any(transfers._sending for transfers in parts_of(scheduler, Transfers))
    return is_idle and lends and len(scheduler._waiting) > 0


_account: LentBlocks | None = None
"""That of the present run."""
_original = Leases.release


def _release(self: Leases, names: Sequence[str]) -> Any:
    if _account is not None and kernel.the_world is not None:
        _account.note(self, names)
    return _original(self, names)


Leases.release = _release
