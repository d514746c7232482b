"""Faults that are put into the product, to show that seeds find them. Each is one that a change could bring in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from raycore.engine import mailbox
from raycore.kvcache import prefix_cache
from raycore.kvcache.block_pool import BlockPool
from raycore.kvcache.block_table import BlockTable
from raycore.parts.adapters.engine.slots import AdapterSlots
from raycore.parts.constraints.grammar.masks import MaskMaker
from raycore.parts.constraints.scheduler import Constraints, GrammarMasks
from raycore.parts.drafts.scheduler import worker_guesses
from raycore.parts.images.scheduler import EncoderInputs
from raycore.parts.weights.engine import RankWeights
from raycore.scheduler import prefixes, request
from raycore.scheduler.request import Request
from raycore.scheduler.slots import SlotTable
from raycore.scheduler.step_builder import InFlight, StepBuilder
from simulation.putting_in import substitute
from simulation.world.kernel import pause

Patch = Callable[..., Any]


def blocks_of_a_window_are_freed_a_token_too_early() -> None:
    original = BlockTable.release_unseen
    substitute(BlockTable, "release_unseen", lambda self, slots, computed: original(self, slots, computed + 1))


def shared_blocks_are_not_counted() -> None:
    def share(self: BlockPool, blocks: list[int]) -> None:
        free = [block for block in blocks if self._cached.pop(block, 0) is None]
        self._num_references[free] += 1

    def release(self: BlockPool, blocks: Any) -> None:
        original(self, blocks[self._num_references[blocks] > 0])

    original = BlockPool.release
    substitute(BlockPool, "share", share)
    substitute(BlockPool, "release", release)


def a_block_is_left_out_of_a_plan() -> None:
    original = StepBuilder.finish

    def finish(self: StepBuilder, step: int, *args: Any, **kwargs: Any) -> Any:
        if len(self.block_slots) > 2:
            del self.block_ids[-(len(self.block_ids) // len(self.block_slots)) :]
            del self.block_slots[-1]
        return original(self, step, *args, **kwargs)

    substitute(StepBuilder, "finish", finish)


def prefixes_are_shared_among_adapters() -> None:
    def set_adapter(self: Request, adapter_slot: int, load_id: int) -> None:
        self.adapter = adapter_slot

    substitute(Request, "set_adapter", set_adapter)


def prefixes_are_shared_among_salts() -> None:
    substitute(request, "root_digest", lambda salt: prefix_cache.ROOT_DIGEST)


def prefixes_are_shared_among_features() -> None:
    substitute(prefix_cache, "_features_of_block", lambda features, start, size: b"")


def blocks_are_known_by_their_own_tokens_alone() -> None:
    def extend(digests: list[bytes], tokens: Any, num_blocks: int, size: int, root: bytes = b"", features: Any = ()):
        for index in range(len(digests), num_blocks):
            alone: list[bytes] = []
            original(alone, tokens[index * size :], 1, size, root, ())
            digests += alone

    original = prefix_cache.extend_digests
    substitute(request, "extend_digests", extend)
    substitute(prefixes, "extend_digests", extend)


def computed_tokens_are_kept_over_an_update_of_weights() -> None:
    substitute(RankWeights, "_forget_computed", lambda self: None)


def embeddings_are_kept_over_an_update_of_weights() -> None:
    substitute(EncoderInputs, "_clear", lambda self: None)


def outputs_are_sent_twice() -> None:
    original = mailbox._Outbox.add

    def add(self: Any, outputs: Any) -> None:
        original(self, outputs)
        if len(outputs.token_ids) > 3:
            original(self, outputs)

    substitute(mailbox._Outbox, "add", add)


def commands_are_taken_without_a_lock() -> None:
    def take(self: mailbox.Mailbox, wait_s: float = 0.0) -> list[Any]:
        if wait_s and not (self._commands or self._stopping):
            with self._arrived:
                self._arrived.wait(wait_s)
        commands = list(self._commands)
        pause()
        self._commands.clear()
        return commands

    substitute(mailbox.Mailbox, "take", take)


def outputs_are_taken_without_a_lock() -> None:
    original = mailbox.StepOutputs.merge

    def take(self: Any, timeout_s: float) -> Any:
        with self._ready:
            if not (self._is_due or self.closed):
                self._ready.wait(timeout_s)
            if not (self._is_due or self.closed) or not self._steps:
                return None
        steps = list(self._steps)
        pause()
        self._steps = []
        self._is_due, self._due_s = False, float("inf")
        self._num_taken += 1
        return original(steps, 0.0)

    substitute(mailbox._Outbox, "take", take)


def a_stream_that_begins_late_is_not_ended() -> None:
    original = mailbox.Mailbox.forget_client

    def forget_client(self: mailbox.Mailbox, client: int, *, is_gone: bool = True, connection: int = 0) -> None:
        original(self, client, is_gone=is_gone, connection=-1)

    substitute(mailbox.Mailbox, "forget_client", forget_client)


def a_preempted_request_forgets_its_last_token() -> None:
    original = SlotTable.leave

    def leave(self: SlotTable, leaving: Request) -> None:
        original(self, leaving)
        if len(leaving.tokens) > leaving.num_prompt_tokens:
            leaving.tokens = leaving.tokens[:-1]

    substitute(SlotTable, "leave", leave)


def results_of_a_slots_earlier_request_count() -> None:
    original = InFlight.new_tokens

    def new_tokens(self: InFlight, result: Any, table: SlotTable) -> Any:
        before = table.num_departures
        table.num_departures = self.num_departures
        try:
            new = original(self, result, table)
        finally:
            table.num_departures = before
        return new.where(np.array([table.requests[slot] is not None for slot in new.slots.tolist()], np.bool_))

    substitute(InFlight, "new_tokens", new_tokens)


def an_adapter_makes_room_while_it_is_used() -> None:
    original = AdapterSlots._find_slot

    def find_slot(self: AdapterSlots, may_go: Any, is_replacement: bool) -> int | None:
        if len(self.adapters) >= self.num_adapters:
            for own in self.adapters.values():
                if own.is_ready:
                    own.users.clear()
        return original(self, may_go, is_replacement)

    substitute(AdapterSlots, "_find_slot", find_slot)


def a_constraint_does_not_wait_for_the_last_token() -> None:
    substitute(Constraints, "needs_output", lambda self, request: False)


def masks_do_not_wait_for_the_last_token() -> None:
    substitute(GrammarMasks, "is_due", lambda self, step: True)


def masks_follow_an_accepted_draft_as_if_it_were_wrong() -> None:
    original = MaskMaker.make
    substitute(
        MaskMaker, "make", lambda self, outputs: original(self, [each._replace(num_drafts=0) for each in outputs])
    )


def drafts_that_do_not_pay_are_tried_always() -> None:
    substitute(worker_guesses, "TRIAL_AFTER", 1)


FAULTS: dict[str, Patch] = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and not name.startswith("_")
}
"""By name."""

KNOWN = {
    "blocks_of_a_window_are_freed_a_token_too_early": 2,
    "prefixes_are_shared_among_adapters": 15,
    "prefixes_are_shared_among_salts": 2,
    "prefixes_are_shared_among_features": 2,
    "blocks_are_known_by_their_own_tokens_alone": 2,
    "computed_tokens_are_kept_over_an_update_of_weights": 13,
    "embeddings_are_kept_over_an_update_of_weights": 5,
    "commands_are_taken_without_a_lock": 4,
    "a_stream_that_begins_late_is_not_ended": 6,
    "results_of_a_slots_earlier_request_count": 5,
    "an_adapter_makes_room_while_it_is_used": 153,
    "drafts_that_do_not_pay_are_tried_always": 152,
    "a_constraint_does_not_wait_for_the_last_token": 12,
    "masks_do_not_wait_for_the_last_token": 6,
    "masks_follow_an_accepted_draft_as_if_it_were_wrong": 19,
}
"""Seeds that have found what few find. They look first."""
