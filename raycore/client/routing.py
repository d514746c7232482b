"""Routes requests to ranks: to the least loaded one, with affinity for ranks whose prefix cache holds the prompt.

`choose_rank()` is the whole policy and is pure. `Router` keeps what `choose_rank()` needs: this client's unfinished
requests, each rank's last reported load, and which prompts went to which rank, or which prefixes the ranks say that
they hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from raycore.client.matched_ranks import Matched, matched, tokens_by_rank
from raycore.messages import LoadView

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from raycore.client.held_prefixes import HeldPrefixes

_WAITING_WEIGHT = 4.0
"""A waiting request counts as this many running requests, because waiting requests mean that the rank is full."""

_TOKENS_PER_REQUEST = 512
"""This many prompt tokens count as one more running request."""

_MAX_AFFINITY = 4.0
"""Cached tokens make up for the load of at most this many running requests."""

_CHUNK_TOKENS = 64
_MAX_CHUNKS = 64
_MAX_REMEMBERED_CHUNKS = 1 << 15
_GOLDEN_RATIO = 0.6180339887498949
"""Multiples of it, modulo 1, are far from each other, however many there are."""
_ALL = slice(None)


@dataclass(frozen=True)
class RankLoad:
    """A rank's load, as known to one client."""

    num_requests: int = 0
    """Unfinished requests on the rank, of this client and others."""
    num_waiting: int = 0
    """Those of `num_requests` that wait in the rank's queue."""
    num_prompt_tokens: float = 0.0
    """Estimated number of prompt tokens of this client's own unfinished requests on the rank."""

    @property
    def score(self) -> float:
        """The load as one number, in units of the load of one running request."""
        waiting = min(self.num_waiting, self.num_requests)
        return self.num_requests + (_WAITING_WEIGHT - 1) * waiting + self.num_prompt_tokens / _TOKENS_PER_REQUEST


def choose_rank(
    scores: NDArray[np.float64], matched_tokens: NDArray[np.int64] | None = None, preferred: int = 0
) -> int:
    """Choose the rank for a request.

    Args:
        scores: float64[k]: the load of each rank, as `RankLoad.score` says. Infinite for those that get no requests.
        matched_tokens: int64[k]: how many leading tokens of the prompt each rank's prefix cache likely holds. None: no
            rank's prefix cache holds any.
        preferred: the first of equal ranks: the others follow in order, and from the end on those before it.

    Returns: the index of the rank with the lowest load, or of the first such rank. Cached tokens reduce a rank's load,
    up to a limit.
    """
    if matched_tokens is not None:
        scores = scores - np.minimum(matched_tokens / _TOKENS_PER_REQUEST, _MAX_AFFINITY)
    best = int(scores.argmin())
    if not best < preferred < len(scores):
        return best
    later = preferred + int(scores[preferred:].argmin())
    return later if scores[later] == scores[best] else best


class PrefixAffinity:
    """Remembers which ranks got which prompt prefixes, in chunks of 64 tokens.

    Holds at most `max_chunks` prefixes. Forgets those that were routed longest ago.
    """

    def __init__(self, max_chunks: int = _MAX_REMEMBERED_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._ranks: OrderedDict[int, int] = OrderedDict()
        """By the hash of a prompt prefix: a bit mask of the ranks that have got it."""

    def match(self, chunks: Sequence[int]) -> Matched:
        """Which ranks were sent how many leading tokens of a prompt before.

        `chunks`: the prompt's `prompt_chunks()`.
        """
        return matched((self._ranks.get(chunk, 0) for chunk in chunks), _CHUNK_TOKENS)

    def add(self, chunks: Sequence[int], rank: int) -> None:
        """Note that the prompt with these `prompt_chunks()` was sent to `rank`."""
        for chunk in chunks:
            self._ranks[chunk] = self._ranks.get(chunk, 0) | 1 << rank
            self._ranks.move_to_end(chunk)
        while len(self._ranks) > self._max_chunks:
            self._ranks.popitem(last=False)

    def forget(self, rank: int) -> None:
        """Forget which prompts were sent to `rank`, because its prefix cache is gone."""
        for chunk in self._ranks:
            self._ranks[chunk] &= ~(1 << rank)


def prompt_chunks(token_ids: Sequence[int], cache_salt: str | None = None) -> list[int]:
    """Hashes of the prompt's first 64, 128, ... tokens, at most 64 hashes. Each hash includes the salt."""
    chunks: list[int] = []
    value = hash(cache_salt)
    for start in range(0, min(len(token_ids) // _CHUNK_TOKENS, _MAX_CHUNKS) * _CHUNK_TOKENS, _CHUNK_TOKENS):
        value = hash((value, tuple(token_ids[start : start + _CHUNK_TOKENS])))
        chunks.append(value)
    return chunks


@dataclass(slots=True)
class _Counts:
    """A router's counts for one rank."""

    own: int = 0
    """This client's unfinished requests."""
    own_tokens: float = 0.0
    """Estimated number of prompt tokens of this client's unfinished requests."""
    others: int = 0
    """Unfinished requests of other clients, as of the last report."""
    waiting: int = 0
    """Requests that wait in the rank's queue, as of the last report."""

    @property
    def load(self) -> RankLoad:
        return RankLoad(self.own + self.others, self.waiting, self.own_tokens)


class Placed(NamedTuple):
    """Where a request goes, and which ranks hold how much of its prompt, if they say so."""

    rank: int
    num_held: int = 0
    """How many leading tokens of the prompt that rank holds."""
    holder: int | None = None
    """The rank that holds most of the prompt, if that is more than `rank` holds."""
    num_elsewhere: int = 0
    """How many leading tokens `holder` holds."""


class Router:
    """Assigns one client's requests to the ranks in service. Not thread-safe.

    The loads are kept in an array, by dp_rank, and change with each event. So the time for a request hardly grows with
    the number of ranks: some 1 ns for each.
    """

    def __init__(self, ranks: Iterable[int] = (), held: HeldPrefixes | None = None, client_index: int = 0) -> None:
        """
        Args:
            held: which prefixes the ranks hold, as they say. None: they don't, so it is guessed.
            client_index: clients prefer different ones of equal ranks. Otherwise those of an idle engine would all
                choose the same ones, until these report their loads.
        """
        self._counts: dict[int, _Counts] = {}
        self._room = np.full(1, np.inf)
        self._scores = self._room[:0]
        """float64[k], by dp_rank: `RankLoad.score`, infinite for those not in service. The beginning of `_room`."""
        self._affinity = PrefixAffinity()
        self._preference = client_index * _GOLDEN_RATIO % 1.0
        self.held = held
        for rank in ranks:
            self.add(rank)

    def add(self, rank: int) -> None:
        """Start assigning requests to the rank."""
        if rank >= len(self._room):
            room = np.full(2 * (rank + 1), np.inf)
            room[: len(self._room)] = self._room
            self._room = room
        if rank >= len(self._scores):
            self._scores = self._room[: rank + 1]
        self._counts[rank] = _Counts()
        self._scores[rank] = 0.0

    def remove(self, rank: int) -> None:
        """Stop assigning requests to the rank, and drop its counts."""
        if self._counts.pop(rank, None) is not None:
            self._scores[rank] = np.inf
            self._affinity.forget(rank)
            if self.held is not None:
                self.held.forget(rank)

    @property
    def has_ranks(self) -> bool:
        """Whether there is at least one rank to which requests can be assigned."""
        return bool(self._counts)

    def has(self, rank: int | None) -> bool:
        """Whether requests can be assigned to the rank."""
        return rank in self._counts

    def has_among(self, ranks: slice) -> bool:
        """Whether requests can be assigned to one of the ranks with these numbers."""
        return bool(np.isfinite(self._scores[ranks]).any())

    def tokens_by_rank(self, found: Matched) -> NDArray[np.int64]:
        """int64[k], by dp_rank: how many leading tokens of a prompt each rank has. 0 for those not in service."""
        return np.where(np.isfinite(self._scores), tokens_by_rank(found, len(self._scores)), 0)

    def place(
        self,
        prompt: Sequence[int],
        *,
        cache_salt: str | None = None,
        rank: int | None = None,
        among: slice = _ALL,
    ) -> Placed:
        """Assign a prompt to a rank. It counts as a request on the rank until `finish()`.

        There must be at least one rank: see `has_ranks`.

        Args:
            prompt: the prompt's token ids.
            cache_salt: the prompt's salt.
            rank: the rank that gets the prompt, if it is in service. Otherwise a rank is chosen.
            among: the numbers of the ranks from which it is chosen.

        Returns: the rank, and what ranks hold.
        """
        wanted = rank if self.has(rank) else None
        if self.held is not None:
            placed = self._place_by_held(self.held, prompt, cache_salt, wanted, among)
        else:
            placed = Placed(self._guess(prompt, cache_salt, wanted, among))
        counts = self._counts[placed.rank]
        counts.own += 1
        counts.own_tokens += len(prompt)
        self._scores[placed.rank] = counts.load.score
        return placed

    def observe(self, rank: int, load: LoadView | None) -> None:
        """Store the load that a rank has reported. If that includes more requests than this client has on the rank, the
        others are attributed to other clients."""
        counts = self._counts.get(rank)
        if load is not None and counts is not None:
            counts.others = max(0, load.num_waiting + load.num_running - counts.own)
            counts.waiting = load.num_waiting
            self._scores[rank] = counts.load.score

    def finish(self, rank: int) -> None:
        """Note that one of this client's requests on `rank` has ended, or has moved to another rank."""
        counts = self._counts.get(rank)
        if counts is None:
            return  # the rank was removed with its counts
        assert counts.own > 0, f"rank {rank} has no requests of this client"
        # assumes that the request's prompt had the average length: exact accounting isn't worth its cost
        counts.own_tokens *= (counts.own - 1) / counts.own
        counts.own -= 1
        self._scores[rank] = counts.load.score

    def correct(self, num_own: Mapping[int, int]) -> None:
        """Forget requests that were placed and are on no rank, because an interrupt came in between.

        `num_own`: how many of this client's requests each rank has. 0 for ranks that it leaves out.
        """
        for rank, counts in self._counts.items():
            while counts.own > num_own.get(rank, 0):
                self.finish(rank)

    def num_own(self, rank: int) -> int | None:
        """Number of this client's requests on a rank; None if no requests are assigned to this rank any more."""
        counts = self._counts.get(rank)
        return None if counts is None else counts.own

    def loads(self) -> dict[int, RankLoad]:
        """The known load of each rank."""
        return {rank: counts.load for rank, counts in self._counts.items()}

    def _guess(self, prompt: Sequence[int], cache_salt: str | None, wanted: int | None, among: slice) -> int:
        if len(self._counts) == 1:
            return next(iter(self._counts))
        chunks = prompt_chunks(prompt, cache_salt)
        rank = self._choose(self._affinity.match(chunks), among) if wanted is None else wanted
        self._affinity.add(chunks, rank)
        return rank

    def _place_by_held(
        self, held: HeldPrefixes, prompt: Sequence[int], cache_salt: str | None, wanted: int | None, among: slice
    ) -> Placed:
        keys = held.keys(prompt, cache_salt)
        rank = self._choose(held.match(keys), among) if wanted is None else wanted
        stored = self.tokens_by_rank(held.match_stored(keys))
        held.add(keys, rank)
        holder = int(stored.argmax())
        num_held, most = int(stored[rank]), int(stored[holder])
        return Placed(rank, num_held) if most <= num_held else Placed(rank, num_held, holder, most)

    def _choose(self, found: Matched, among: slice) -> int:
        first, end, _ = among.indices(len(self._scores))
        tokens = tokens_by_rank(found, len(self._scores))[among] if found else None
        return first + choose_rank(self._scores[among], tokens, int(self._preference * (end - first)))
