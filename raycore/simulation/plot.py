"""Draws simulations as SVG: one setting over time, or several settings by throughput and latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from raycore.simulation.outcome import Outcome
from raycore.simulation.planning import Simulated

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP = 860, 190, 80, 20, 34
_COLORS = ("#1f5fa8", "#c4541a", "#2f7d4f", "#7a4fa0", "#8c6d1f", "#444444")
_NUM_BINS = 60

Points = list[tuple[float, float]]
Numbers = NDArray[np.float64]


def plot(simulated: Sequence[Simulated]) -> str:
    """The picture, as the text of an SVG file."""
    panels = _over_time(simulated[0].outcome) if len(simulated) == 1 else _by_setting(simulated)
    height = len(panels) * (_HEIGHT + _TOP + 40) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        parts += panel.drawn(index * (_HEIGHT + _TOP + 40) + _TOP)
    return "\n".join([*parts, "</svg>", ""])


class _Panel:
    """A diagram with a line or a row of points for each series."""

    def __init__(
        self, title: str, across: str, series: dict[str, Points], *, marks: Sequence[float] = (), dots: bool = False
    ) -> None:
        self._title, self._across, self._series = title, across, series
        self._marks, self._dots = marks, dots

    def drawn(self, top: float) -> list[str]:
        """The elements of the panel, below `top`."""
        every = [point for points in self._series.values() for point in points]
        most_x = _round_up(max((x for x, _ in every), default=1.0))
        most_y = _round_up(max((y for _, y in every), default=1.0))
        width, bottom = _WIDTH - _LEFT - _RIGHT, top + _HEIGHT

        def place(x: float, y: float) -> tuple[float, float]:
            return round(_LEFT + x / most_x * width, 1), round(bottom - y / most_y * _HEIGHT, 1)

        parts = [f'<text x="{_LEFT}" y="{top - 14}" font-weight="bold">{escape(self._title)}</text>']
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            x, y = place(most_x * share, most_y * share)
            parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + width}" y2="{y}" stroke="#dddddd"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{most_y * share:g}</text>')
            parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{most_x * share:g}</text>')
        parts.append(f'<text x="{_LEFT + width}" y="{bottom + 30}" text-anchor="end">{escape(self._across)}</text>')
        for mark in self._marks:
            x, _ = place(mark, 0.0)
            parts.append(f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="#b00020" stroke-dasharray="4 3"/>')
        right = float(_LEFT + width)
        for index, (name, points) in enumerate(self._series.items()):
            color = _COLORS[index % len(_COLORS)]
            places = [place(x, y) for x, y in points]
            if self._dots:
                for x, y in places:
                    parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"/>')
            else:
                text = " ".join(f"{x},{y}" for x, y in places)
                parts.append(f'<polyline points="{text}" fill="none" stroke="{color}" stroke-width="1.6"/>')
            if name:
                parts.append(f'<text x="{right}" y="{top - 14}" text-anchor="end" fill="{color}">{escape(name)}</text>')
                right -= 8 + 7 * len(name)
        return parts


def _over_time(outcome: Outcome) -> list[_Panel]:
    """Latency, throughput and ranks over the time of the trace."""
    done = outcome.done
    ttfts = [(each.arrival_s, each.ttft_s) for each in done if each.ttft_s is not None]
    ended = [(each, each.last_token_s) for each in done if each.last_token_s is not None]
    tpots = [(last_s, each.tpot_s * 1e3) for each, last_s in ended if each.tpot_s is not None]
    end_s = outcome.last_s or 1.0
    edges = np.linspace(0.0, end_s, _NUM_BINS + 1)
    counts = [each.num_output for each, _ in ended]
    rate = np.histogram([last_s for _, last_s in ended], edges, weights=counts)[0] / (edges[1] - edges[0])
    middles = (edges[1:] + edges[:-1]) / 2
    marks = [loss.at_s for loss in outcome.losses]
    panels = [
        _Panel("Time to the first token (s), by arrival", "s", _percentiles(ttfts, edges), marks=marks),
        _Panel("Time per token (ms), by end", "s", _percentiles(tpots, edges), marks=marks),
        _Panel(
            "Output tokens per second, of requests by their end",
            "s",
            {"": list(zip(middles.tolist(), rate.tolist(), strict=True))},
            marks=marks,
        ),
    ]
    if len(outcome.ranks) > 1:
        panels.append(_Panel("Ranks that serve", "s", {"": _steps(outcome.ranks, end_s)}, marks=marks))
    return panels


def _by_setting(simulated: Sequence[Simulated]) -> list[_Panel]:
    """A point for each setting."""
    panels: list[_Panel] = []
    for key, title in (("ttft_p99_s", "Time to the first token, p99 (s)"), ("tpot_p99_s", "Time per token, p99 (s)")):
        series: dict[str, Points] = {}
        for each in simulated:
            if each.figures[key] is not None:
                name = " ".join(map(str, each.setting.values()))
                series[name] = [(each.figures["output_tokens_per_s"], each.figures[key])]
        panels.append(_Panel(f"{title}, by {', '.join(simulated[0].setting)}", "output tokens/s", series, dots=True))
    return panels


def _percentiles(points: Points, edges: Numbers) -> dict[str, Points]:
    """Percentiles of the values between each two edges, as points in the middle."""
    found: dict[str, Points] = {"p99": [], "p50": []}
    times, values = np.array([x for x, _ in points]), np.array([y for _, y in points])
    places = np.searchsorted(edges, times, "right") - 1
    for index in range(len(edges) - 1):
        here = values[places == index]
        if len(here):
            middle = float(edges[index] + edges[index + 1]) / 2
            found["p50"].append((middle, float(np.percentile(here, 50))))
            found["p99"].append((middle, float(np.percentile(here, 99))))
    return found


def _steps(ranks: Sequence[tuple[float, int]], end_s: float) -> Points:
    points: Points = []
    for (start_s, count), (next_s, _) in zip(ranks, [*ranks[1:], (end_s, 0)], strict=True):
        points += [(min(start_s, end_s), count), (min(next_s, end_s), count)]
    return points


def _round_up(value: float) -> float:
    """A round number that isn't less."""
    if value <= 0:
        return 1.0
    unit = 10 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 2, 4, 5, 8, 10) if step * unit >= value * (1 - 1e-12))
