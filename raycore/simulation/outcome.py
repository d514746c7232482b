"""What has become of the requests of a simulated trace, and its figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from raycore.messages import LoadView

if TYPE_CHECKING:
    from raycore.simulation.rank import SimulatedRank

_PERCENTILES = (50, 99)


@dataclass(slots=True)
class RequestOutcome:
    """One request. Times are seconds of the trace."""

    arrival_s: float
    num_prompt: int
    first_token_s: float | None = None
    last_token_s: float | None = None
    queue_s: float | None = None
    """From the arrival in the engine to its first step."""
    num_output: int = 0
    num_cached: int = 0
    """Tokens of the prompt that its rank had."""
    error: str | None = None
    """Why it has no output, or not all of it."""

    @property
    def ttft_s(self) -> float | None:
        """The time to its first token. None: it has none."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """The mean time from a token to the next one. None: it has no second one."""
        if self.first_token_s is None or self.last_token_s is None or self.num_output < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output - 1)

    @property
    def e2el_s(self) -> float | None:
        """The time to its last token. None: it has none."""
        return None if self.last_token_s is None else self.last_token_s - self.arrival_s


@dataclass(slots=True)
class KilledRank:
    """A rank that was killed."""

    rank: int
    at_s: float
    did_happen: bool = True
    """Whether there was such a rank then."""
    num_moved: int = 0
    """Requests that went on elsewhere."""
    num_tokens_again: int = 0
    """Tokens of their prompts and outputs, which are computed again as far as no cache has them."""
    stalls_s: list[float] = field(default_factory=list[float])
    """For each of them, how long after the rank's death its next token came."""


@dataclass(slots=True)
class Outcome:
    """A simulated deployment."""

    requests: dict[int, RequestOutcome] = field(default_factory=dict[int, RequestOutcome])
    """By their place in the trace."""
    losses: list[KilledRank] = field(default_factory=list[KilledRank])
    ranks: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(time, how many ranks serve from then on)."""
    num_preemptions: int = 0
    num_queried: int = 0
    """Tokens of prompts that were looked up in prefix caches."""
    num_cached: int = 0
    """Those that were found."""
    num_steps: int = 0
    num_output_tokens: int = 0
    rank_s: float = 0.0
    """For how long ranks started and served, all together."""
    busy_s: float = 0.0
    """For how long they computed."""

    def note_load(self, before: LoadView, load: LoadView) -> None:
        """Count what a rank's load says since the one before."""
        self.num_preemptions += load.num_preemptions - before.num_preemptions
        self.num_queried += load.prefix_cache_queries - before.prefix_cache_queries
        self.num_cached += load.prefix_cache_hits - before.prefix_cache_hits

    def note_ranks(self, now_s: float, count: int) -> None:
        """Note how many ranks serve from now on."""
        if not self.ranks or self.ranks[-1][1] != count:
            self.ranks.append((now_s, count))

    def note_rank(self, rank: SimulatedRank, served_s: float) -> None:
        """Count a rank that is gone."""
        self.num_steps += rank.num_steps
        self.busy_s += rank.busy_s
        self.rank_s += served_s

    @property
    def done(self) -> list[RequestOutcome]:
        """The requests that have all of their output."""
        return [each for each in self.requests.values() if each.error is None]

    @property
    def last_s(self) -> float:
        """When the last token came."""
        return max((each.last_token_s or 0.0 for each in self.requests.values()), default=0.0)

    def figures(self) -> dict[str, Any]:
        """What is told of it, by name. Times are in seconds."""
        done = self.done
        duration_s = self.last_s
        found: dict[str, Any] = {
            "requests": len(self.requests),
            "completed": len(done),
            "refused_or_failed": len(self.requests) - len(done),
            "errors": sorted({each.error for each in self.requests.values() if each.error is not None})[:5],
            "duration_s": duration_s,
            "prompt_tokens": sum(each.num_prompt for each in done),
            "output_tokens": sum(each.num_output for each in done),
            "requests_per_s": _rate(len(done), duration_s),
            "output_tokens_per_s": _rate(sum(each.num_output for each in done), duration_s),
        }
        values = {
            "ttft": [each.ttft_s for each in done],
            "tpot": [each.tpot_s for each in done],
            "e2el": [each.e2el_s for each in done],
            "queue": [each.queue_s for each in done],
        }
        for name, all_s in values.items():
            seconds = [each for each in all_s if each is not None]
            for percentile in _PERCENTILES:
                found[f"{name}_p{percentile}_s"] = float(np.percentile(seconds, percentile)) if seconds else None
        found |= {
            "preemptions": self.num_preemptions,
            "cache_hit_rate": _rate(self.num_cached, self.num_queried),
            "steps": self.num_steps,
            "rank_hours": self.rank_s / 3600,
            "device_busy": _rate(self.busy_s, self.rank_s),
            "most_ranks": max((count for _, count in self.ranks), default=0),
        }
        if self.losses:
            found["failures"] = [_loss_figures(loss) for loss in self.losses]
        return found


def _loss_figures(loss: KilledRank) -> dict[str, Any]:
    if not loss.did_happen:
        return {"rank": loss.rank, "at_s": loss.at_s, "did_happen": False}
    stalls_s = loss.stalls_s
    return {
        "rank": loss.rank,
        "at_s": loss.at_s,
        "moved_requests": loss.num_moved,
        "tokens_again": loss.num_tokens_again,
        "stall_p50_s": float(np.percentile(stalls_s, 50)) if stalls_s else None,
        "stall_max_s": max(stalls_s, default=None),
    }


def _rate(count: float, whole: float) -> float:
    return count / whole if whole else 0.0
