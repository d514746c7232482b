"""Routes requests to ranks: to the least loaded one, with affinity for ranks whose prefix cache holds the prompt.

`choose_rank()` is the whole policy and is pure. `Router` keeps what `choose_rank()` needs: this client's unfinished
requests, each rank's last reported load, and which prompts went to which rank, or which prefixes the ranks say that
they hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from raycore.messages import LoadView

if TYPE_CHECKING:
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


def choose_rank(loads: Sequence[RankLoad], matched_tokens: Sequence[int] | None = None) -> int:
    """Choose the rank for a request.

    Args:
        loads: one for each rank.
        matched_tokens: for each rank, how many leading tokens of the prompt its prefix cache likely holds. None: no
            rank's prefix cache holds any.

    Returns: the index in `loads` of the rank with the lowest load, or of the first such rank. Cached tokens reduce a
    rank's load, up to a limit.
    """
    matched = matched_tokens or [0] * len(loads)
    scores = [
        load.score - min(tokens / _TOKENS_PER_REQUEST, _MAX_AFFINITY)
        for load, tokens in zip(loads, matched, strict=True)
    ]
    return min(range(len(loads)), key=scores.__getitem__)


class PrefixAffinity:
    """Remembers which ranks got which prompt prefixes, in chunks of 64 tokens.

    Holds at most `max_chunks` prefixes. Forgets those that were routed longest ago.
    """

    def __init__(self, max_chunks: int = _MAX_REMEMBERED_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._ranks: OrderedDict[int, int] = OrderedDict()
        """By the hash of a prompt prefix: a bit mask of the ranks that have got it."""

    def match(self, chunks: Sequence[int], ranks: Sequence[int]) -> list[int]:
        """For each of `ranks`: how many leading tokens of a prompt were sent to that rank before.

        `chunks`: the prompt's `prompt_chunks()`.
        """
        matched = [0] * len(ranks)
        seen = -1
        for chunk in chunks:
            seen &= self._ranks.get(chunk, 0)
            if not seen:
                break
            for index, rank in enumerate(ranks):
                matched[index] += _CHUNK_TOKENS * (seen >> rank & 1)
        return matched

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
    """Assigns one client's requests to the ranks in service. Not thread-safe."""

    def __init__(self, ranks: Iterable[int] = (), held: HeldPrefixes | None = None) -> None:
        """`held`: which prefixes the ranks hold, as they say. None: they don't, so it is guessed."""
        self._counts: dict[int, _Counts] = {rank: _Counts() for rank in ranks}
        self._affinity = PrefixAffinity()
        self.held = held

    def add(self, rank: int) -> None:
        """Start assigning requests to the rank."""
        self._counts[rank] = _Counts()

    def remove(self, rank: int) -> None:
        """Stop assigning requests to the rank, and drop its counts."""
        if self._counts.pop(rank, None) is not None:
            self._affinity.forget(rank)
            if self.held is not None:
                self.held.forget(rank)

    @property
    def has_ranks(self) -> bool:
        """Whether there is at least one rank to which requests can be assigned."""
        return bool(self._counts)

    @property
    def ranks(self) -> Collection[int]:
        """The ranks to which requests can be assigned."""
        return self._counts.keys()

    def assign(
        self, prompts: Sequence[Sequence[int]], *, cache_salt: str | None = None, rank: int | None = None
    ) -> list[int]:
        """Assign each prompt to a rank. Each prompt counts as a request on its rank until `finish()`.

        There must be at least one rank: see `has_ranks`.

        Args:
            prompts: the prompts' token ids.
            cache_salt: the prompts' salt.
            rank: the rank that gets all prompts, if it is in service. Otherwise a rank is chosen for each prompt.

        Returns: the rank of each prompt.
        """
        return [self.place(prompt, cache_salt=cache_salt, rank=rank).rank for prompt in prompts]

    def place(
        self,
        prompt: Sequence[int],
        *,
        cache_salt: str | None = None,
        rank: int | None = None,
        among: Collection[int] | None = None,
    ) -> Placed:
        """Assign a prompt to a rank, as `assign` does.

        Args:
            among: the ranks in service that may get the prompt. None: all.

        Returns: the rank, and what ranks hold.
        """
        ranks = list(self._counts if among is None else among)
        if self.held is not None:
            placed = self._place_by_held(self.held, prompt, cache_salt, rank, ranks)
        else:
            placed = Placed(self._guess(prompt, cache_salt, rank, ranks))
        counts = self._counts[placed.rank]
        counts.own += 1
        counts.own_tokens += len(prompt)
        return placed

    def observe(self, rank: int, load: LoadView | None) -> None:
        """Store the load that a rank has reported. If that includes more requests than this client has on the rank, the
        others are attributed to other clients."""
        counts = self._counts.get(rank)
        if load is not None and counts is not None:
            counts.others = max(0, load.num_waiting + load.num_running - counts.own)
            counts.waiting = load.num_waiting

    def finish(self, rank: int) -> None:
        """Note that one of this client's requests on `rank` has ended, or has moved to another rank."""
        counts = self._counts.get(rank)
        if counts is None:
            return  # the rank was removed with its counts
        assert counts.own > 0, f"rank {rank} has no requests of this client"
        # assumes that the request's prompt had the average length: exact accounting isn't worth its cost
        counts.own_tokens *= (counts.own - 1) / counts.own
        counts.own -= 1

    def num_own(self, rank: int) -> int | None:
        """Number of this client's requests on a rank; None if no requests are assigned to this rank any more."""
        counts = self._counts.get(rank)
        return None if counts is None else counts.own

    def loads(self) -> dict[int, RankLoad]:
        """The known load of each rank."""
        return {
            rank: RankLoad(counts.own + counts.others, counts.waiting, counts.own_tokens)
            for rank, counts in self._counts.items()
        }

    def _guess(self, prompt: Sequence[int], cache_salt: str | None, wanted: int | None, ranks: list[int]) -> int:
        if len(ranks) == 1:
            return ranks[0]
        chunks = prompt_chunks(prompt, cache_salt)
        if wanted is not None and wanted in ranks:
            rank = wanted
        else:
            rank = ranks[choose_rank(self._loads_of(ranks), self._affinity.match(chunks, ranks))]
        self._affinity.add(chunks, rank)
        return rank

    def _place_by_held(
        self, held: HeldPrefixes, prompt: Sequence[int], cache_salt: str | None, wanted: int | None, ranks: list[int]
    ) -> Placed:
        keys, everywhere = held.keys(prompt, cache_salt), list(self._counts)
        if wanted is not None and wanted in ranks:
            rank = wanted
        else:
            rank = ranks[choose_rank(self._loads_of(ranks), held.match(keys, ranks))]
        stored = held.match_stored(keys, everywhere)
        held.add(keys, rank)
        num_held, most = stored[everywhere.index(rank)], max(stored)
        if most <= num_held:
            return Placed(rank, num_held)
        return Placed(rank, num_held, everywhere[stored.index(most)], most)

    def _loads_of(self, ranks: list[int]) -> list[RankLoad]:
        loads = self.loads()
        return [loads[rank] for rank in ranks]
