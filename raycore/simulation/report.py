"""The figures of simulations as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycore.simulation.planning import COMPARED, Simulated
from raycore.status import aligned

_LINES = {
    "requests": ("requests", "{:,.0f}"),
    "completed": ("completed", "{:,.0f}"),
    "duration_s": ("duration", "{:,.1f} s"),
    "requests_per_s": ("requests per second", "{:,.2f}"),
    "output_tokens_per_s": ("output tokens per second", "{:,.1f}"),
    "ttft_p50_s": ("time to the first token, p50", "{:,.3f} s"),
    "ttft_p99_s": ("time to the first token, p99", "{:,.3f} s"),
    "tpot_p50_s": ("time per token, p50", "{:,.4f} s"),
    "tpot_p99_s": ("time per token, p99", "{:,.4f} s"),
    "e2el_p50_s": ("whole request, p50", "{:,.2f} s"),
    "e2el_p99_s": ("whole request, p99", "{:,.2f} s"),
    "queue_p50_s": ("in the queue, p50", "{:,.3f} s"),
    "queue_p99_s": ("in the queue, p99", "{:,.3f} s"),
    "preemptions": ("preemptions", "{:,.0f}"),
    "cache_hit_rate": ("prompt tokens from prefix caches", "{:.1%}"),
    "device_busy": ("time in which devices compute", "{:.1%}"),
    "rank_hours": ("rank hours", "{:,.2f}"),
    "most_ranks": ("most ranks at a time", "{:,.0f}"),
}
_COLUMNS = {
    "output_tokens_per_s": "tokens/s",
    "ttft_p50_s": "TTFT p50",
    "ttft_p99_s": "TTFT p99",
    "tpot_p50_s": "TPOT p50",
    "tpot_p99_s": "TPOT p99",
    "preemptions": "preempted",
    "cache_hit_rate": "cached",
    "device_busy": "busy",
    "rank_hours": "rank h",
}


def report(simulated: Sequence[Simulated]) -> str:
    """The figures of one setting as lines, or of several as a table with a row for each."""
    if len(simulated) == 1:
        return "\n".join(_one(simulated[0].figures))
    names = list(simulated[0].setting)
    rows = [[*names, *_COLUMNS.values()]]
    for each in simulated:
        cells = [_text(name, each.figures[name]) for name in _COLUMNS]
        rows.append([*(str(each.setting[name]) for name in names), *cells])
    lines = [aligned(rows)]
    for each in simulated:
        setting = ", ".join(f"{name}={value}" for name, value in each.setting.items())
        lines += [f"{setting}: {line}" for line in (*_errors(each.figures), *_failures(each.figures))]
    return "\n".join(lines)


def _one(figures: dict[str, Any]) -> list[str]:
    width = max(len(name) for name, _ in _LINES.values())
    lines = [f"{name:{width}}  {_text(key, figures[key])}" for key, (name, _) in _LINES.items()]
    return [*lines, *_errors(figures), *_failures(figures)]


def _errors(figures: dict[str, Any]) -> list[str]:
    if not figures["refused_or_failed"]:
        return []
    return [f"{figures['refused_or_failed']} requests were refused or failed, such as: {figures['errors'][0]}"]


def _failures(figures: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for each in figures.get("failures", []):
        where = f"rank {each['rank']} at {each['at_s']:g} s"
        if not each.get("did_happen", True):
            lines.append(f"{where}: no such rank served then")
            continue
        lines.append(
            f"{where} was killed: {each['moved_requests']} requests moved, with {each['tokens_again']:,} tokens to "
            f"compute again; their next tokens came {_seconds(each['stall_p50_s'])} later (p50), "
            f"{_seconds(each['stall_max_s'])} at most"
        )
    whole = figures.get("without_failures")
    if whole is not None:
        changes = [
            f"{_LINES[name][0]} {_text(name, figures[name])} instead of {_text(name, whole[name])}"
            for name in COMPARED
            if figures[name] is not None and whole[name] is not None
        ]
        lines.append("with failures: " + "; ".join(changes))
    return lines


def _text(name: str, value: Any) -> str:
    return "-" if value is None else _LINES[name][1].format(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
