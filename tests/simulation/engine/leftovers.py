"""What a rank still holds although all of its requests have ended: blocks, slots, places of adapters, and the rest."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

from raycore.engine.core import EngineCore
from raycore.engine.mailbox import Mailbox
from raycore.scheduler.scheduler import Scheduler


def leftovers(core: EngineCore, mailbox: Mailbox) -> list[str]:
    """What there is that shouldn't be, each as "what: how much". An invariant that doesn't hold is one, too."""
    scheduler = core.scheduler
    assert isinstance(scheduler, Scheduler)
    held = [*_of_scheduler(scheduler), *_of_preparation(core), *_of_parts(scheduler)]
    held += [
        ("steps in flight", len(core._in_flight)),
        ("arrival times", core._arrived_s),
        ("changes", mailbox.changes),
        ("commands", mailbox._commands),
    ]
    found = [f"{what}: {value}" for what, value in held if value]
    try:
        scheduler.check_integrity()
    except AssertionError as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        found.append(f"a broken invariant: {place.line} ({place.name}, {error})")
    return found


def _of_scheduler(scheduler: Scheduler) -> Iterator[tuple[str, Any]]:
    load, pool, slots = scheduler.load(), scheduler._pool, scheduler._slots
    yield "running requests", load.num_running
    yield "waiting requests", load.num_waiting
    yield "blocks that are neither free nor cached", pool.num_blocks - len(pool._blank) - len(pool._cached)
    yield "references to blocks", int(pool._num_references.sum())
    yield "slots that aren't free", len(slots.requests) - len(slots._free)
    yield "blocks of free slots", int(scheduler._blocks.capacity.sum())
    yield "tokens that stop somebody", int(slots.num_stoppers.sum())
    yield "requests", scheduler._requests
    yield "requests held back", scheduler._held
    yield "prompts under way", scheduler._prefills
    yield "plans in flight", len(scheduler._in_flight)
    yield "adapters of running requests", scheduler._adapters
    yield "requests without an adapter's place", scheduler._without_adapter


def _of_preparation(core: EngineCore) -> Iterator[tuple[str, Any]]:
    grammars, adapters = core._preparation._grammars, core._preparation.adapters
    yield "grammars under way", grammars._deadlines_s
    yield "grammars to be asked for", grammars._new
    yield "grammars to be dropped", grammars._dropped
    if adapters is None:
        return
    yield "adapters in use", adapters._used
    yield "requests that wait for adapters", adapters._waiting
    yield "requests whose adapters have failed", adapters._failed
    yield "requests with adapters that have begun", adapters._begun
    places = adapters._slots
    yield "users of adapters", {key: own.users for key, own in places.adapters.items() if own.users}
    taken = [own.load.slot for own in places.adapters.values()]
    if sorted([*taken, *places._free]) != list(range(places.num_adapters + 1)):
        yield "places of adapters that are taken, and free", (taken, places._free)


def _of_parts(scheduler: Scheduler) -> Iterator[tuple[str, Any]]:
    encoder, states, transfers = scheduler._encoder, scheduler._states, scheduler._transfers
    if encoder is not None:
        yield "embeddings in use", encoder._num_in_use
        yield "requests that use embeddings", encoder._partial
    if states is not None:
        yield "states that a plan reads", states._snapshots._read
        yield "states that a plan writes", states._snapshots._written
    if transfers is not None:
        yield "requests that wait for blocks", transfers.num_waiting
        yield "blocks that the connector holds", list(transfers.held_blocks())
        yield "what steps load", {step: loads for step, loads in transfers._step_loads.items() if loads}
