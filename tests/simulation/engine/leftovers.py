"""What a rank still holds although all of its requests have ended: blocks, slots, places of adapters, and the rest."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

from support.scheduler_parts import parts_of

from raycore.engine.core import EngineCore
from raycore.engine.mailbox import Mailbox
from raycore.engine.preparation import AdapterWaits, GrammarWaits
from raycore.parts.adapters.engine.adapters import AdaptersInUse
from raycore.parts.adapters.scheduler import AdapterLimit
from raycore.parts.images.scheduler import EncoderInputs
from raycore.parts.transfers.scheduler.transfers import Transfers
from raycore.scheduler.prefix_states import PrefixStates
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
    yield "requests that parts keep", scheduler._set_aside
    yield "prompts under way", scheduler._prefills
    yield "plans in flight", len(scheduler._in_flight)


def _of_preparation(core: EngineCore) -> Iterator[tuple[str, Any]]:
    for grammars in (part.grammars for part in core.parts if isinstance(part, GrammarWaits)):
        yield "grammars under way", grammars._deadlines_s
        yield "grammars to be asked for", grammars._new
        yield "grammars to be dropped", grammars._dropped
    for part in core.parts:
        if isinstance(part, AdapterWaits):
            yield from _of_adapters(part.adapters)


def _of_adapters(adapters: AdaptersInUse) -> Iterator[tuple[str, Any]]:
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
    for adapters in parts_of(scheduler, AdapterLimit):
        yield "adapters of running requests", adapters._num_users
        yield "requests without an adapter's place", adapters._waiting
    for encoder in parts_of(scheduler, EncoderInputs):
        yield "embeddings in use", encoder._num_in_use
        yield "requests that use embeddings", encoder._partial
    for states in parts_of(scheduler, PrefixStates):
        yield "states that a plan reads", states.snapshots._read
        yield "states that a plan writes", states.snapshots._written
        yield "rows that are reserved for states", states.snapshots._coming
        yield "rows that loads keep", list(states.snapshots._kept.elements())
    for transfers in parts_of(scheduler, Transfers):
        yield "requests that wait for blocks", transfers.num_waiting
        yield "blocks that the connector holds", list(transfers.held_blocks())
        yield "what steps load", {step: loads for step, loads in transfers._step_loads.items() if loads}
