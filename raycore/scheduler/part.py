"""The contract between a scheduler and what adds to it: prefix cache, states, drafts, transfers, encoder, adapters,
constraints.

A part overrides some of the hooks of `SchedulerPart`, whose own methods do nothing. The scheduler calls them at fixed
moments, those of parts with a lower `order` first. In return, a part sees of the scheduler what `SchedulerView` has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, ClassVar

from raycore.hooks import overridden, overriding
from raycore.kvcache.prefix_cache import NOTHING_CACHED, CachedPrefix

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from raycore.config import SchedulerConfig
    from raycore.kvcache.block_pool import BlockPool
    from raycore.kvcache.block_table import BlockTable
    from raycore.messages import StepPlan, StepResult
    from raycore.scheduler.outputs import StepOutputs
    from raycore.scheduler.request import Request
    from raycore.scheduler.slots import SlotTable
    from raycore.scheduler.step_builder import InFlight, StepBuilder


class Verdict(Enum):
    """What a part says of a waiting request that could begin."""

    START = auto()
    """It may begin."""
    SET_ASIDE = auto()
    """It can't begin yet. The part keeps it: see `SchedulerPart.set_aside`."""
    SET_ASIDE_WITH_BLOCKS = auto()
    """The same, and the part takes the request's first blocks for it, once there are enough."""


@dataclass(slots=True)
class Start:
    """What a request begins with, if it gets a slot. Nothing has been allocated for that yet."""

    request: Request
    cached: CachedPrefix = NOTHING_CACHED
    """The blocks that it begins with."""
    num_cached: int = 0
    """How many tokens these have."""
    num_published: int = 0
    """How many of the blocks are in the prefix cache."""
    num_loaded: int = 0
    """Number of tokens after these, in full blocks, that its first step loads."""

    def begin_with(self, cached: CachedPrefix, block_size: int) -> None:
        """Begin with full blocks of the prefix cache."""
        self.cached, self.num_cached, self.num_published = cached, cached.num_blocks * block_size, cached.num_blocks

    @property
    def num_computed(self) -> int:
        """Number of tokens that needn't be computed."""
        return self.num_cached + self.num_loaded


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """What a part sees of its scheduler, and what it may have it do. Arrays and tables are the scheduler's own."""

    config: SchedulerConfig
    slots: SlotTable
    """The running requests."""
    blocks: BlockTable
    """The blocks of each slot."""
    pool: BlockPool
    hooks: Hooks
    """Those of all parts of the scheduler."""
    num_blocks_for: Callable[[int], int]
    """Return the maximum number of blocks that a request with so many computed tokens needs."""
    preempt: Callable[[Request], None]
    """Take a running request's slot and blocks, and put it into the waiting queue."""
    wait_again: Callable[[Iterable[Request]], None]
    """Put requests that were set aside into the waiting queue."""
    fail: Callable[[Request, str], None]
    """End a request that runs, or was set aside, as failed. The text says why."""
    publish: Callable[[list[int]], None]
    """Have the full blocks of slots published whose tokens have arrived."""
    check_again: Callable[[], None]
    """Have the first waiting request checked again that there were too few blocks for."""


class SchedulerPart:
    """What a capability adds to planning. Its hooks are called on the scheduler's thread, and none may block.

    Asking changes nothing: `may_start`, `offer` and `limit_chunk` leave no trace of a request that doesn't begin after
    all. What becomes of it is told by `started`, `set_aside`, `chunk_planned` and `left`.
    """

    order: ClassVar[int] = 0
    """Hooks of parts with a lower number are called first. A test has the order of all parts, and why it matters."""
    divides_prompts: bool = True
    """Whether any part of a prompt may be computed in a step of its own."""

    def attach(self, view: SchedulerView) -> None:
        """Take part in a scheduler, which has no requests yet. The hooks of its other parts are bound already."""

    def request_limits(self) -> dict[str, Any]:
        """Return fields of `RequestLimits` by which requests are checked when they are submitted."""
        return {}

    # ---- requests

    def submitted(self, request: Request) -> None:
        """Note a new request."""

    def may_start(self, request: Request) -> bool:
        """Whether the most urgent waiting request may begin, before anything is found out about it."""
        return True

    def offer(self, start: Start) -> Verdict:
        """Add to `start` what a waiting request would begin with, after what parts before this one have added."""
        return Verdict.START

    def set_aside(self, start: Start) -> None:
        """Keep a request that this part doesn't let begin yet. It has left the waiting queue, and `requests` has it.

        It goes on with `SchedulerView.wait_again`, `SchedulerView.fail`, or `ready`.
        """

    def ready(self) -> Iterator[Start]:
        """Yield requests that were set aside, and begin before those that wait.

        Each is yielded again until `started` says that it has begun. Called before waiting requests are admitted.
        """
        return iter(())

    def promised_slots(self) -> int:
        """Return how many slots are needed by requests that were set aside and have blocks."""
        return 0

    def promised_blocks(self, request: Request) -> int:
        """Return how many more blocks requests need that were set aside and have blocks, except `request`."""
        return 0

    def take_back(self) -> bool:
        """Free some blocks that the part keeps for others than requests. Returns whether it has."""
        return False

    def needs_output(self, request: Request) -> bool:
        """Whether each next token of a request that gets a slot can only be planned when the last one has arrived."""
        return False

    def started(self, start: Start) -> None:
        """Note that a request has got its slot and its first blocks. `Request.was_started`: not for the first time."""

    def left(self, request: Request, slot: int, *, is_over: bool) -> None:
        """Note that a request has left its slot, which still has its blocks.

        `is_over`: whether it has ended, instead of being preempted.
        """

    def aborted(self, request: Request) -> None:
        """Note that a request was aborted that has no slot. If it was set aside here, it no longer is."""

    # ---- a step's plan

    def wants_step(self) -> bool:
        """Whether a step is of use although there is nothing to compute."""
        return False

    def begin_try(self) -> None:
        """Note that a step's chunks are about to be chosen, possibly not for the first time for this step."""

    def limit_chunk(self, request: Request, start: int, end: int, limit: int) -> int:
        """Return up to which token a step may compute a request, from `start` on, if it is to compute up to `end`.

        `limit`: up to which token it might compute. It is beyond `end` if only an option limits a prompt's tokens in a
        step.
        """
        return end

    def keeps_tokens(self) -> bool:
        """Whether the rest of the step's tokens is kept for a request that has just got none."""
        return False

    def decodes_planned(self, step: StepBuilder) -> None:
        """Note that the next tokens of `step.decodes` are planned, and counted in `SlotTable.computed`."""

    def chunk_planned(self, request: Request, start: int, end: int, *, is_first: bool) -> None:
        """Note that the step computes a request's tokens from `start` to before `end`.

        `is_first`: whether this is the request's first chunk since it has got its slot.
        """

    def plan_finished(self, plan: StepPlan) -> None:
        """Add to a plan that is otherwise complete."""

    # ---- a step's result

    def result_arrived(self, step: InFlight, result: StepResult) -> None:
        """Take in a step's result before the requests do. A part may change what is reported under its name."""

    def result_applied(self, step: InFlight, result: StepResult, outputs: StepOutputs) -> None:
        """Take in a step's result after the requests, and add to the step's outputs."""

    # ---- blocks and embeddings

    def blocks_filled(self, slots: list[int], *, is_planned: bool) -> None:
        """Note that full blocks of slots may be shared whose tokens have arrived and are planned for computation.

        `is_planned`: whether the step that is being planned computes the last of them.
        """

    def blocks_stored(
        self, request: Request, indexes: Sequence[int], blocks: NDArray[np.int32], group: int, *, is_planned: bool
    ) -> None:
        """Note that the prefix cache has got blocks of a request in a group of layers.

        Args:
            indexes: which of its blocks, ascending.
            blocks: the ids of all its blocks in the group.
            is_planned: whether their content is only complete after the step that is being planned.
        """

    def block_removed(self, digest: bytes, group: int) -> None:
        """Note that the prefix cache has removed a block."""

    def blocks_cleared(self) -> None:
        """Note that the prefix cache has removed all blocks."""

    def state_saved(self, request: Request, num_blocks: int, row: int) -> None:
        """Note that the step that is being planned keeps the state after a request's first blocks, in a row.

        Of a model whose layers keep states: see `raycore.scheduler.prefix_states`.
        """

    def state_removed(self, digest: bytes) -> None:
        """Note that the state of a prefix is kept no more. The step that is being planned may write its row."""

    def clearing(self) -> None:
        """Forget what was computed: the prefix cache is about to be cleared. No request has a slot."""

    def cache_lost(self) -> None:
        """Note that the workers have lost the whole cache. All requests are about to be preempted, then `clearing`."""

    def drop_embeddings(self) -> None:
        """Have the workers drop the embeddings of all features."""

    def identity_taken(self, identity: bytes) -> None:
        """Note what the workers' results are known by from now on: see `SchedulerProtocol.take_identity`."""

    # ---- what others ask

    def load(self) -> dict[str, Any]:
        """Return fields of `LoadView`. Called after each step."""
        return {}

    def requests(self) -> Iterable[Request]:
        """Return the requests that are set aside here. For tests."""
        return ()

    def held_blocks(self) -> Iterable[int]:
        """Return the blocks to which this part has references, as often as it has them. For tests."""
        return ()

    def check_integrity(self) -> None:
        """Assert the invariants between two steps. For tests."""


class Hooks:
    """The hooks that parts override, in the order of the parts. Empty: no part needs it."""

    def __init__(self, parts: Sequence[SchedulerPart]) -> None:
        self.submitted = overridden(parts, SchedulerPart.submitted)
        self.may_start = overriding(parts, SchedulerPart.may_start)
        """The parts, because one that says no gets the request. Also below."""
        self.offer = overriding(parts, SchedulerPart.offer)
        self.ready = overridden(parts, SchedulerPart.ready)
        self.promised_slots = overridden(parts, SchedulerPart.promised_slots)
        self.promised_blocks = overridden(parts, SchedulerPart.promised_blocks)
        self.take_back = overridden(parts, SchedulerPart.take_back)
        self.needs_output = overridden(parts, SchedulerPart.needs_output)
        self.started = overridden(parts, SchedulerPart.started)
        self.left = overridden(parts, SchedulerPart.left)
        self.aborted = overridden(parts, SchedulerPart.aborted)
        self.wants_step = overridden(parts, SchedulerPart.wants_step)
        self.begin_try = overridden(parts, SchedulerPart.begin_try)
        self.limit_chunk = overridden(parts, SchedulerPart.limit_chunk)
        self.keeps_tokens = overridden(parts, SchedulerPart.keeps_tokens)
        self.decodes_planned = overridden(parts, SchedulerPart.decodes_planned)
        self.chunk_planned = overridden(parts, SchedulerPart.chunk_planned)
        self.plan_finished = overridden(parts, SchedulerPart.plan_finished)
        self.result_arrived = overridden(parts, SchedulerPart.result_arrived)
        self.result_applied = overridden(parts, SchedulerPart.result_applied)
        self.blocks_filled = overridden(parts, SchedulerPart.blocks_filled)
        self.blocks_stored = overridden(parts, SchedulerPart.blocks_stored)
        self.block_removed = overridden(parts, SchedulerPart.block_removed)
        self.blocks_cleared = overridden(parts, SchedulerPart.blocks_cleared)
        self.state_saved = overridden(parts, SchedulerPart.state_saved)
        self.state_removed = overridden(parts, SchedulerPart.state_removed)
        self.clearing = overridden(parts, SchedulerPart.clearing)
        self.cache_lost = overridden(parts, SchedulerPart.cache_lost)
        self.drop_embeddings = overridden(parts, SchedulerPart.drop_embeddings)
        self.identity_taken = overridden(parts, SchedulerPart.identity_taken)
        self.load = overridden(parts, SchedulerPart.load)

    def ask(self, start: Start) -> tuple[Verdict, SchedulerPart]:
        """Ask what a request would begin with. Returns the answer of the last part that was asked, and that part."""
        for part in self.offer:
            verdict = part.offer(start)
            if verdict is not Verdict.START:
                return verdict, part
        return Verdict.START, _NO_PART

    def take_back_any(self) -> bool:
        """Take back blocks that are kept for others, because a request lacks some. Returns whether there were any."""
        return any(take_back() for take_back in self.take_back)

    def need_output(self, request: Request) -> bool:
        """Whether a request waits for its last token before the next one is planned."""
        return any(needs_output(request) for needs_output in self.needs_output)

    def want_step(self) -> bool:
        """Whether a step is of use without tokens, because a part has something under way."""
        return any(wants_step() for wants_step in self.wants_step)


_NO_PART = SchedulerPart()
