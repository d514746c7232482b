"""Plans which features of prompts, such as images, are encoded in a step, and which embeddings the workers keep.

Workers keep embeddings by the identifiers of features, so that requests with the same image share them. The scheduler
decides what they keep: at most `cache_size` embeddings. An embedding is *in use* from the step that computes the first
token of its feature's range until the step that computes the last one. Embeddings that aren't in use stay as long as
their space isn't needed; those that haven't been used for the longest time are dropped first.

A feature is encoded in the step that computes the first of its tokens, or the first one that isn't cached. If it
doesn't fit into the step, the request's chunk ends before it. A request holds at most one feature in part, and needs no
more space to go on with it, so there is always a request that can go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raycore.messages import EncoderPlan, Feature, FeatureData, StepPlan
from raycore.parts.images.config import EncoderLimits
from raycore.scheduler.part import SchedulerPart, SchedulerView
from raycore.scheduler.request import Request


@dataclass(slots=True)
class _Try:
    """What a step encodes and uses, as far as it has been tried. Nothing has been planned yet."""

    room: int
    """How many embeddings fit beside those in use."""
    budget: int
    """How many embeddings the step may still compute."""
    pinned: set[str]
    """The identifiers of features that the step uses."""
    is_full: bool = False
    """Whether a feature didn't fit. Then no other one is begun, so that none waits forever."""
    is_out_of_tokens: bool = False
    """Whether a feature that can't be divided has more tokens than are left of the step's. Then no request after it
    gets any."""


class EncoderInputs(SchedulerPart):
    """What the workers of one rank encode, and the embeddings that they keep."""

    order = 60

    def __init__(self, limits: EncoderLimits) -> None:
        self._limits = limits
        self.divides_prompts = limits.is_divisible
        self._sizes: dict[str, int] = {}
        """By identifier: number of embeddings that the workers keep, those of the plan in progress included."""
        self._num_users: dict[str, int] = {}
        """By identifier: number of ranges in prompts for which embeddings are in use."""
        self._idle: dict[str, None] = {}
        """The identifiers of embeddings that aren't in use, the least recently used one first."""
        self._partial: dict[int, Feature] = {}
        """By seq_id: the feature of which some tokens are still to be computed."""
        self._num_kept = 0
        self._num_in_use = 0
        self._inputs: list[tuple[Feature, FeatureData]] = []
        self._freed: list[str] = []
        self._done: list[Feature] = []
        """Features whose last tokens are in the plan in progress."""
        self._try = _Try(0, 0, set())
        self._identity = b""
        """As in `EncoderPlan`."""

    def attach(self, view: SchedulerView) -> None:
        self._slots = view.slots
        self._preempt = view.preempt

    def request_limits(self) -> dict[str, Any]:
        return {"encoder": self._limits}

    # ---- trying: changes nothing but the present try

    def begin_try(self) -> None:
        self._try = _Try(self._limits.cache_size - self._num_in_use, self._limits.cache_size, set())

    def keeps_tokens(self) -> bool:
        """Whether the rest of the step's tokens is kept for a feature that has more of them."""
        return self._try.is_out_of_tokens

    def limit_chunk(self, request: Request, start: int, end: int, limit: int) -> int:
        """End a chunk before a feature that the step can't compute. One that can't be divided may exceed `end`."""
        for feature in _in_range(request, start, limit):
            feature_end = feature.position + feature.num_tokens
            if feature.position >= end:
                break
            if end < feature_end and not self._limits.is_divisible:
                if feature.position > start:
                    return feature.position
                if feature_end > limit:
                    self._try.is_out_of_tokens = True
                    return start
                end = feature_end
            if not self._pin(feature):
                self._try.is_full = True
                return max(start, feature.position)
        return end

    def _pin(self, feature: Feature) -> bool:
        """Use a feature in the step that is tried, if its embeddings are there or can be computed."""
        identifier, size, tried = feature.identifier, feature.num_tokens, self._try
        if identifier in self._num_users or identifier in tried.pinned:
            return True
        is_kept = identifier in self._sizes
        if tried.is_full or size > tried.room or (not is_kept and size > tried.budget):
            return False
        tried.room -= size
        if not is_kept:
            tried.budget -= size
        tried.pinned.add(identifier)
        return True

    # ---- planning

    def chunk_planned(self, request: Request, start: int, end: int, *, is_first: bool) -> None:
        """Plan what a step needs that computes the tokens of a request from `start` to before `end`.

        `limit_chunk` has said that it can.
        """
        for feature in _in_range(request, start, end):
            if self._partial.get(request.seq_id) is not feature:
                self._acquire(request, feature)
            if feature.position + feature.num_tokens <= end:
                self._partial.pop(request.seq_id, None)
                self._done.append(feature)
            else:
                self._partial[request.seq_id] = feature

    def plan_finished(self, plan: StepPlan) -> None:
        """Add what the plan does with features."""
        done, self._done = self._done, []
        for feature in done:
            self._release(feature)
        if self._inputs or self._freed:
            plan.encoder = EncoderPlan(self._freed, self._inputs, self._identity)
            self._freed, self._inputs = [], []

    def _acquire(self, request: Request, feature: Feature) -> None:
        identifier = feature.identifier
        if identifier not in self._sizes:
            self._make_room(feature.num_tokens)
            self._sizes[identifier] = feature.num_tokens
            self._num_kept += feature.num_tokens
            self._inputs.append((feature, request.data_of(feature)))
        if identifier not in self._num_users:
            self._num_in_use += self._sizes[identifier]
            self._idle.pop(identifier, None)
        self._num_users[identifier] = self._num_users.get(identifier, 0) + 1

    def _release(self, feature: Feature) -> None:
        identifier = feature.identifier
        self._num_users[identifier] -= 1
        if not self._num_users[identifier]:
            del self._num_users[identifier]
            self._idle[identifier] = None
            self._num_in_use -= self._sizes[identifier]

    def _make_room(self, size: int) -> None:
        """Drop embeddings that nobody uses until `size` more fit."""
        unneeded = (identifier for identifier in list(self._idle) if identifier not in self._try.pinned)
        while self._num_kept + size > self._limits.cache_size:
            self._drop(next(unneeded))

    def _drop(self, identifier: str) -> None:
        del self._idle[identifier]
        self._num_kept -= self._sizes.pop(identifier)
        self._freed.append(identifier)

    # ---- requests and embeddings go

    def left(self, request: Request, slot: int, *, is_over: bool) -> None:
        """Note that a request has lost its slot. What it has used stays until its space is needed."""
        feature = self._partial.pop(request.seq_id, None)
        if feature is not None:
            self._release(feature)

    def drop_embeddings(self) -> None:
        """Preempt the requests that have begun to use some, and drop all. The workers may have lost them already."""
        for request in self._slots.running():
            if request.seq_id in self._partial:
                self._preempt(request)
        self._clear()

    def _clear(self) -> None:
        """Drop all embeddings. None may be in use."""
        assert not self._num_users
        for identifier in list(self._idle):
            self._drop(identifier)

    def identity_taken(self, identity: bytes) -> None:
        self._clear()
        self._identity = identity

    def check_integrity(self) -> None:
        assert not self._inputs
        assert not self._done
        assert self._num_kept == sum(self._sizes.values()) <= self._limits.cache_size
        assert self._num_in_use == sum(self._sizes[identifier] for identifier in self._num_users)
        assert self._sizes.keys() == self._idle.keys() | self._num_users.keys()
        assert not self._idle.keys() & self._num_users.keys()
        assert self._partial.keys() <= {request.seq_id for request in self._slots.running()}
        users = [feature.identifier for feature in self._partial.values()]
        assert self._num_users == {identifier: users.count(identifier) for identifier in users}


def _in_range(request: Request, start: int, end: int) -> Iterator[Feature]:
    """Yield the features of a request that have tokens from `start` to before `end`, in order."""
    for feature in request.features:
        if feature.position >= end:
            return
        if feature.position + feature.num_tokens > start:
            yield feature
