"""What an operator's abort says and does: requests that ran have ended soon after it, and it says how many there were.

A client knows of a request as soon as its caller asks, unless a constraint or an adapter is looked at first. Callers
hear of the end within a turn of their loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulation.cluster import kinds
from simulation.cluster.accounts.account import Account
from simulation.cluster.operations.catalogue import CAPABILITY_OF
from simulation.cluster.operations.contract import NEVER_S, end_of
from simulation.cluster.records import Deed, Record

_KNOWN_S, _TOLD_S = 0.05, 0.5
"""Virtual seconds within which a client knows of a request that has come, and a caller of its end. Threads of a program
wait for each other meanwhile, some milliseconds each."""
_LOOKED_AT = {"adapter", "constraint", "mask"}
"""Kinds of requests that the client has only when something of them has been looked at, which may take long."""


class Aborts(Account):
    """The aborts of requests that the driver's own client has, or that API servers have."""

    def over(self) -> Iterator[str]:
        # without the processes that lose requests, or stand still; at statements, threads wait longer for each other
        if (self.run.front is not None and self.run.scenario.faults) or self.run.scenario.at_statements:
            return
        aborts = [each for each in self.run.recorder.deeds if each.operation.kind in ("abort", "abort_requests")]
        for deed in aborts:
            is_heard = self.run.front is None or deed.operation.kind == "abort_requests"
            if deed.error is None and deed.ended_s is not None and is_heard:
                yield from self._of(deed, deed.ended_s, [each for each in aborts if each is not deed])

    def _of(self, deed: Deed, ended_s: float, others: list[Deed]) -> Iterator[str]:
        said = f"{deed.operation.kind} {deed.operation.arguments}, from {deed.began_s:.4f} s to {ended_s:.4f} s"
        least = most = 0
        for record in filter(lambda each: _is_named(deed, each), self.run.recorder.records):
            if record.submitted_s is None or record.submitted_s > ended_s:
                continue
            record_ended_s = NEVER_S if record.ended_s is None else record.ended_s
            if record_ended_s >= deed.began_s:
                most += record.request.n  # a call that pools has a request for each of its prompts
            if not _is_meant(deed, record):
                continue
            ran = record.submitted_s < deed.began_s - _KNOWN_S and not record.request.wants.keys() & _LOOKED_AT
            if ran and record_ended_s > ended_s + _TOLD_S:
                yield f"{said}: {record.name} ran, and went on"
            was_told = record_ended_s <= ended_s + _TOLD_S and _has_aborted(record)
            if was_told and record_ended_s >= deed.began_s and not _was_by_another(record, others):
                least += 1
        if deed.operation.kind == "abort_requests" and not least <= int(str(deed.result)) <= most:
            yield f"{said}: it says that it aborted {deed.result} requests, and not {least} to {most}"


def _is_named(deed: Deed, record: Record) -> bool:
    return CAPABILITY_OF[deed.operation.kind].aborts(deed.operation, record.name)


def _is_meant(deed: Deed, record: Record) -> bool:
    """Whether it surely aborts the request, if that runs."""
    request, has_numbers = record.request, record.request.n > 1 and "pooled" in record.request.wants
    if kinds.asked(request).error is not None or (has_numbers and deed.operation.kind == "abort"):
        return False  # it fails by itself, or its prompts have ids of their own
    return _is_named(deed, record)


def _has_aborted(record: Record) -> bool:
    """Whether a caller who didn't leave has heard of an abort."""
    is_said = record.error is not None and str(record.error).endswith("was aborted")
    return not record.is_aborted and (is_said or any(each.finish_reason == "abort" for each in record.sequences))


def _was_by_another(record: Record, others: list[Deed]) -> bool:
    """Whether another operator may have aborted it."""
    assert record.submitted_s is not None
    assert record.ended_s is not None
    return any(
        _is_meant(each, record) and each.began_s <= record.ended_s and end_of(each) >= record.submitted_s
        for each in others
    )
