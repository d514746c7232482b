"""What reports of disturbed runs have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from chaos.run import DisturbedRun


def disturbance_rows(run: DisturbedRun) -> list[list[object]]:
    """How the engine was disturbed, and what became of the requests."""
    faults, interrupter = run.observer.faults, run.interrupter
    rows: list[list[object]] = [
        ["requests", run.comparison.num_results],
        ["seconds, disturbed", f"{run.elapsed_s:.1f}"],
        ["faults injected", f"{len(faults)}: {counted(fault.kind for fault in faults)}"],
    ]
    if interrupter.is_active:
        rows += [
            ["interruptions", f"{interrupter.num_done}: {counted(interrupter.counts.elements())}"],
            ["faults while the engine was", counted(fault.phase for fault in faults)],
            ["outputs of streams while it was still", run.num_outputs_while_still()],
        ]
    churn = run.churn
    if churn.num_added or churn.num_refused:
        refused = f"refused {churn.num_refused} times"
        rows.append(["an adapter was added and removed", f"{churn.num_added} times, {refused}"])
    return [*rows, *run.comparison.rows()]


def counted(names: Iterable[str]) -> str:
    """Each name with its number."""
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items()) or "none"


def both(values: list[float], digits: int = 2) -> str:
    """The median and the 99th percentile."""
    return f"{_percentile(values, 50):.{digits}f}, {_percentile(values, 99):.{digits}f}  (of {len(values)})"


def print_lost(run: DisturbedRun, most: int = 3) -> None:
    """Print the first errors."""
    for error in run.comparison.lost[:most]:
        print(f"lost: {type(error).__name__}: {error}", flush=True)


def _percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))] if values else float("nan")
