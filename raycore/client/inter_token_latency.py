"""The time between a sequence's tokens, for all sequences that get some at once. Pure."""

from __future__ import annotations

from collections import Counter

from raycore.metrics.counts import Histogram


class InterTokenLatency:
    """Remembers when each running sequence's last token came, by seq_id.

    In steady decode a rank's steps make one token each for the same sequences, in the same order. Such a step is
    compared with the one before as a whole, and only one that differs is looked at token by token.
    """

    def __init__(self) -> None:
        self._last_s: dict[int, float] = {}
        self._latest: dict[int, tuple[list[int], float]] = {}
        """By dp_rank: the seq_ids of its latest step, and its time, which `_last_s` may lack."""

    def __len__(self) -> int:
        self._settle()
        return len(self._last_s)

    def observe(self, dp_rank: int, seq_ids: list[int], made_s: float, histogram: Histogram) -> None:
        """A rank's step has come: count, for each token, the time since the sequence's token before; a first has none.

        Args:
            seq_ids: whose tokens they are, each once.
            made_s: when they were made.
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
        """These sequences have ended."""
        self._settle()
        for seq_id in seq_ids:
            self._last_s.pop(seq_id, None)

    def rebind(self, seq_id: int, new_seq_id: int) -> None:
        """A sequence goes on under another seq_id."""
        self._settle()
        if seq_id in self._last_s:
            self._last_s[new_seq_id] = self._last_s.pop(seq_id)

    def _settle(self) -> None:
        for seq_ids, time_s in self._latest.values():
            self._last_s.update(dict.fromkeys(seq_ids, time_s))
        self._latest.clear()
