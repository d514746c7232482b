"""Which rank gets a request: the least loaded, with affinity for one whose prefix cache holds much of the prompt.

`choose_rank()` is the whole policy and is pure. `Router` keeps what it decides by: the requests that this client has
under way, what each rank last said of its load, and which prompts went where.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raycore.messages import LoadView

_WAITING_WEIGHT = 4.0
"""A waiting request counts as this many running ones: it shows that the rank is full."""

_TOKENS_PER_REQUEST = 512
"""Prompt tokens that weigh as much as one more running request."""

_MAX_AFFINITY = 4.0
"""A rank that holds a prompt's prefix may be ahead of the least loaded one by at most this many requests."""

_CHUNK_TOKENS = 64
_MAX_CHUNKS = 64
_MAX_REMEMBERED_CHUNKS = 1 << 15


@dataclass(frozen=True)
class RankLoad:
    """What routing knows of a rank."""

    num_requests: int = 0
    """Requests under way: this client's own, and what others have there."""
    num_waiting: int = 0
    """Those of `num_requests` that the rank has no room for yet."""
    num_prompt_tokens: float = 0.0
    """Prompt tokens of this client's own requests under way."""

    @property
    def score(self) -> float:
        """In units of running requests."""
        waiting = min(self.num_waiting, self.num_requests)
        return self.num_requests + (_WAITING_WEIGHT - 1) * waiting + self.num_prompt_tokens / _TOKENS_PER_REQUEST


def choose_rank(loads: Sequence[RankLoad], matched_tokens: Sequence[int] | None = None) -> int:
    """The rank for a request.

    Args:
        loads: one for each rank.
        matched_tokens: how many leading tokens of the prompt each rank's prefix cache likely holds; None: none.

    Returns: the rank with the lowest load, where cached tokens count as load that is saved, up to a limit; among equals
        the first.
    """
    matched = matched_tokens or [0] * len(loads)
    scores = [
        load.score - min(tokens / _TOKENS_PER_REQUEST, _MAX_AFFINITY)
        for load, tokens in zip(loads, matched, strict=True)
    ]
    return min(range(len(loads)), key=scores.__getitem__)


class PrefixAffinity:
    """Remembers which ranks have seen a prompt's beginning, in chunks of 64 tokens; forgets the least recently used."""

    def __init__(self, max_chunks: int = _MAX_REMEMBERED_CHUNKS) -> None:
        self._max_chunks = max_chunks
        self._ranks: OrderedDict[int, int] = OrderedDict()
        """By the hash of a prompt's beginning: a bit for each rank that has seen it."""

    def match(self, chunks: Sequence[int], ranks: Sequence[int]) -> list[int]:
        """For each of `ranks`, how many leading tokens of the prompt with these `prompt_chunks()` it has seen."""
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
        """The prompt with these chunks went to `rank`."""
        for chunk in chunks:
            self._ranks[chunk] = self._ranks.get(chunk, 0) | 1 << rank
            self._ranks.move_to_end(chunk)
        while len(self._ranks) > self._max_chunks:
            self._ranks.popitem(last=False)

    def forget(self, rank: int) -> None:
        """The rank is gone, and its cache with it."""
        for chunk in self._ranks:
            self._ranks[chunk] &= ~(1 << rank)


def prompt_chunks(token_ids: Sequence[int], cache_salt: str | None = None) -> list[int]:
    """A hash for each whole chunk that the prompt begins with, each covering the salt and all tokens up to its end."""
    chunks: list[int] = []
    value = hash(cache_salt)
    for start in range(0, min(len(token_ids) // _CHUNK_TOKENS, _MAX_CHUNKS) * _CHUNK_TOKENS, _CHUNK_TOKENS):
        value = hash((value, tuple(token_ids[start : start + _CHUNK_TOKENS])))
        chunks.append(value)
    return chunks


@dataclass(slots=True)
class _Counts:
    """What a router keeps of one rank."""

    own: int = 0
    own_tokens: float = 0.0
    others: int = 0
    waiting: int = 0


class Router:
    """Assigns one client's requests to ranks, which come and go. Not thread-safe: its owner holds a lock."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self._counts: dict[int, _Counts] = {rank: _Counts() for rank in ranks}
        self._affinity = PrefixAffinity()

    def add(self, rank: int) -> None:
        """The rank takes requests."""
        self._counts[rank] = _Counts()

    def remove(self, rank: int) -> None:
        """The rank takes none any more, and what it had isn't under way."""
        if self._counts.pop(rank, None) is not None:
            self._affinity.forget(rank)

    @property
    def has_ranks(self) -> bool:
        """Whether any rank takes requests."""
        return bool(self._counts)

    def assign(
        self, prompts: Sequence[Sequence[int]], *, cache_salt: str | None = None, rank: int | None = None
    ) -> list[int]:
        """A rank for each prompt, given as token ids. Each counts as under way until `finish()`. There is a rank.

        Args:
            cache_salt: the prompts' salt.
            rank: the one that gets them, if it takes requests.
        """
        return [self._assign_one(prompt, cache_salt, rank) for prompt in prompts]

    def observe(self, rank: int, load: LoadView | None) -> None:
        """What a rank says of its load. What exceeds this client's own requests is taken for other clients'."""
        counts = self._counts.get(rank)
        if load is not None and counts is not None:
            counts.others = max(0, load.num_waiting + load.num_running - counts.own)
            counts.waiting = load.num_waiting

    def finish(self, rank: int) -> None:
        """One of this client's requests on `rank` is no longer under way."""
        counts = self._counts.get(rank)
        if counts is None:
            return  # it has gone, and its counts with it
        assert counts.own > 0, f"no request is under way on rank {rank}"
        # which of them it was makes no difference worth keeping track of
        counts.own_tokens *= (counts.own - 1) / counts.own
        counts.own -= 1

    def num_own(self, rank: int) -> int | None:
        """How many of this client's own requests are under way on a rank; None if it takes none."""
        counts = self._counts.get(rank)
        return None if counts is None else counts.own

    def loads(self) -> dict[int, RankLoad]:
        """The ranks' loads as known here."""
        return {
            rank: RankLoad(counts.own + counts.others, counts.waiting, counts.own_tokens)
            for rank, counts in self._counts.items()
        }

    def _assign_one(self, prompt: Sequence[int], cache_salt: str | None, wanted: int | None) -> int:
        ranks = list(self._counts)
        rank = ranks[0]
        if len(ranks) > 1:
            chunks = prompt_chunks(prompt, cache_salt)
            if wanted is not None and wanted in self._counts:
                rank = wanted
            else:
                rank = ranks[choose_rank(list(self.loads().values()), self._affinity.match(chunks, ranks))]
            self._affinity.add(chunks, rank)
        counts = self._counts[rank]
        counts.own += 1
        counts.own_tokens += len(prompt)
        return rank
