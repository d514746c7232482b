"""Measures the time between consecutive tokens of a sequence, usually for all sequences of a step at once. Pure."""

from __future__ import annotations

from collections import Counter


class InterTokenLatency:
    """Remembers when each running sequence got its last token, by seq_id.

    In steady decode, each of a rank's steps makes tokens for each of the same sequences, in the same order. All
    tokens of such a step have the same latency, so there is one for the whole step. For other steps, tokens are
    looked at one by one.
    """

    def __init__(self) -> None:
        self._last_s: dict[int, float] = {}
        self._latest: dict[int, tuple[list[int], float]] = {}
        """By dp_rank: the seq_ids and the time of the rank's latest step, which `_last_s` doesn't contain yet."""

    def __len__(self) -> int:
        self._settle()
        return len(self._last_s)

    def observe(self, dp_rank: int, seq_ids: list[int], made_s: float) -> list[tuple[float, int]]:
        """Return the latencies of a step's tokens, since the tokens before them, and how many have each.

        A sequence's first token has no latency. Tokens that a step gives to one sequence count as one, as in vLLM.

        Args:
            seq_ids: the sequences that got tokens in this step, without repetition.
            made_s: when the tokens were made.
        """
        latest = self._latest.get(dp_rank)
        if latest is not None and latest[0] == seq_ids:
            gaps = [(made_s - latest[1], len(seq_ids))]
        else:
            self._settle()
            counts = Counter(map(self._last_s.get, seq_ids))
            gaps = [(made_s - before_s, times) for before_s, times in counts.items() if before_s is not None]
        self._latest[dp_rank] = seq_ids, made_s
        return gaps

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
