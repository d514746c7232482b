"""Measures the time between consecutive tokens of a sequence, usually for all sequences of a step at once. Pure."""

from __future__ import annotations

from collections import Counter

from raycore.metrics.counts import Histogram


class InterTokenLatency:
    """Remembers when each running sequence got its last token, by seq_id.

    In steady decode, each of a rank's steps makes tokens for each of the same sequences, in the same order. All
    tokens of such a step have the same latency, so the histogram is updated once for the whole step. For other steps,
    it is updated token by token.
    """

    def __init__(self) -> None:
        self._last_s: dict[int, float] = {}
        self._latest: dict[int, tuple[list[int], float]] = {}
        """By dp_rank: the seq_ids and the time of the rank's latest step, which `_last_s` doesn't contain yet."""

    def __len__(self) -> int:
        self._settle()
        return len(self._last_s)

    def observe(self, dp_rank: int, seq_ids: list[int], made_s: float, histogram: Histogram) -> None:
        """Add the latency of each token of a rank's step to `histogram`: the time since the sequence's previous token.

        A sequence's first token has no latency. Tokens that a step gives to one sequence count as one, as in vLLM.

        Args:
            seq_ids: the sequences that got tokens in this step, without repetition.
            made_s: when the tokens were made.
        """
        latest = self._latest.get(dp_rank)
        if latest is not None and latest[0] == seq_ids:
            histogram.observe(made_s - latest[1], len(seq_ids))
        else:
            self._settle()
            for before_s, times in Counter(map(self._last_s.get, seq_ids)).items():
                if before_s is not None:
                    histogram.observe(made_s - before_s, times)
        self._latest[dp_rank] = seq_ids, made_s

    def forget(self, seq_ids: list[int]) -> None:
        """Drop sequences that have ended."""
        self._settle()
        for seq_id in seq_ids:
            self._last_s.pop(seq_id, None)

    def rebind(self, seq_id: int, new_seq_id: int) -> None:
        """Note that a sequence continues under another seq_id."""
        self._settle()
        if seq_id in self._last_s:
            self._last_s[new_seq_id] = self._last_s.pop(seq_id)

    def _settle(self) -> None:
        for seq_ids, time_s in self._latest.values():
            self._last_s.update(dict.fromkeys(seq_ids, time_s))
        self._latest.clear()
