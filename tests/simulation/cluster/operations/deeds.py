"""What must be true of operators' calls, and of the engine meanwhile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from raycore.errors import EngineDeadError
from simulation.cluster.operations.catalogue import CAPABILITY_OF
from simulation.cluster.operations.causes import unexplained
from simulation.cluster.operations.conditions import ASLEEP
from simulation.cluster.operations.contract import History, end_of, is_done, is_refused
from simulation.cluster.operations.weights import WeightNames, checksum_problems
from simulation.cluster.records import Deed, Recorder
from simulation.worker.steps import Step

_ASLEEP_S = 5.0
"""Virtual seconds within which any call ends in an engine that is asleep, unless something has broken: it takes some
messages, and what workers had begun. Only whoever wakes the engine can end what waits for longer."""
_PAUSES = frozenset({"sleep", "wake_up", "pause_generation", "resume_generation"})
_SCALINGS = frozenset({"scale", "scale_elastic_ep"})
"""These wait for ranks that start, and other calls may wait for these. So they may for a pause that waits for requests.
"""
_END_OF_A_WORKER = re.compile(r"worker \d+ \(pid \d+, node \w+\) died")


def problems(history: History, names: WeightNames, recorder: Recorder, steps: Sequence[Step]) -> Iterator[str]:
    """What is wrong with what operators have seen."""
    for deed in history.deeds:
        for problem in _of_deed(deed, history, recorder):
            yield f"{deed.operation.kind} {deed.operation.arguments}, from {deed.began_s:.4f} s on: {problem}"
    yield from _of_holds(history, steps)
    yield from waits_for_wake_ups(history)
    yield from checksum_problems(history, names)


def _of_deed(deed: Deed, history: History, recorder: Recorder) -> Iterator[str]:
    if deed.ended_s is None:
        yield "never ended"
        return
    if deed.ended_s - deed.began_s > CAPABILITY_OF[deed.operation.kind].within_s:
        yield f"took {deed.ended_s - deed.began_s:.0f} s"
    if isinstance(deed.error, EngineDeadError) and recorder.unavailable is not None:
        return
    capability, error = CAPABILITY_OF[deed.operation.kind], deed.error
    refuses = capability.refuses(deed, history)
    if error is None and refuses:
        yield "should have been refused"
    elif is_refused(deed) and refuses is False:
        yield f"was refused: {type(error).__name__}: {error}"
    elif error is not None and not is_refused(deed):
        if not capability.excuses(deed, error, history):
            yield f"failed: {type(error).__name__}: {error}"
        elif recorder.unavailable is None and (wanted := unexplained(deed, error, history)) is not None:
            yield f"failed, though {wanted}: {type(error).__name__}: {error}"
    if capability.survives_losses and _END_OF_A_WORKER.search(str(error)):
        yield f"failed by the end of a worker, whose rank is replaced: {type(error).__name__}: {error}"
    yield from capability.problems(deed, history)


def _of_holds(history: History, steps: Sequence[Step]) -> Iterator[str]:
    for deed in history.deeds:
        for begin_s, end_s in CAPABILITY_OF[deed.operation.kind].holds(deed, history):
            for step in steps:
                if begin_s < step.until_s and step.began_s < end_s:
                    yield (
                        f"{deed.operation.kind} held from {begin_s:.4f} s to {end_s:.4f} s, and {step.process} "
                        f"computed a step from {step.began_s:.4f} s to {step.until_s:.4f} s"
                    )
                    return


def waits_for_wake_ups(history: History) -> Iterator[str]:
    """Calls that go on only when the engine wakes up."""
    for sleep in history.deeds:
        if sleep.operation.kind != "sleep" or not is_done(sleep) or not sleep.operation.arguments.get("level", 1):
            continue
        until_s = min(each.until(history, sleep) for each in ASLEEP.values())
        for deed in history.deeds:
            first_s, last_s = max(deed.began_s, end_of(sleep)), min(end_of(deed), until_s)
            if last_s - first_s > _ASLEEP_S and not _may_wait(deed, first_s, last_s, history):
                yield (
                    f"{deed.operation.kind} {deed.operation.arguments} went on for {last_s - first_s:.1f} s while the "
                    f"engine slept, from {first_s:.4f} s on"
                )


def _may_wait(deed: Deed, first_s: float, last_s: float, history: History) -> bool:
    """Whether a call may take longer than others in this time, in which the engine sleeps."""
    return (
        deed.operation.kind in _PAUSES
        or history.has_broken_by(deed)
        or any(
            (each.operation.kind in _SCALINGS or each.operation.arguments.get("mode") == "wait")
            and each.began_s < last_s
            and end_of(each) > first_s
            for each in history.deeds
        )
    )
