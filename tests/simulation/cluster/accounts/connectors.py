"""What ranks' connectors are told, what they bring, and what they tell those who follow their events.

A follower that knows nothing of the product's state hears all that a connector is told of requests and of the prefix
cache, and another one gets the events of each rank. Neither may hear anything twice, nor of what it doesn't know, and
when the engine is idle both know just what there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from support.scheduler_parts import parts_of

from raycore.parts.transfers.connectors.events import AllBlocksCleared, BlockRemoved, BlockStored
from raycore.parts.transfers.connectors.groups import block_name
from raycore.parts.transfers.engine import KVEvents
from raycore.parts.transfers.scheduler.transfers import Transfers
from raycore.scheduler.prefix_states import PrefixStates
from simulation.cluster.accounts.account import Account, first_worker_of, ranks_of
from simulation.worker import complaints
from simulation.worker.transfers import transfers_of
from simulation.world import kernel

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

_SOURCES = ("host", "disk", "p2p")
"""Where blocks are of which raycore's own connectors load all or nothing."""
_CHANGING = {
    *("sleep", "wake_up", "load_weights", "reload_weights", "update_weights", "start_weight_update"),
    *("finish_weight_update", "cancel_weight_update", "update_weight_version", "break_worker"),
}
"""What operators do after which ranks may have weights that others don't know."""


class Connectors(Account):
    """Those of idle ranks."""

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        has_adapters = self.run.scenario.options.get("enable_lora", False)
        everything = transfers_of(self.run.cluster.world)
        is_over = not any(value for _, each in everything for _, value in (*each.under_way(), *each.leases()))
        identities: set[bytes] = set()
        for connection, _, rank in ranks_of(llm):
            assert rank._core is not None, "the client is connected to it"
            core: Any = rank._core
            name, cache = f"dp_rank {connection.dp_rank}", core.scheduler._pool.prefix_cache
            for transfers in parts_of(core.scheduler, Transfers):
                told: _Told = transfers.connector
                if told.requests:
                    yield f"{name} is idle, and its connector hasn't heard of the end of {sorted(told.requests)}"
                external = core.scheduler.load().external
                num_hits = sum(getattr(external, each) for each in external.__struct_fields__[1:])
                if not told.least_hits <= num_hits <= told.most_hits:
                    yield (
                        f"{name} counts {num_hits} tokens that its connector has brought, and it was asked for "
                        f"{told.least_hits} to {told.most_hits}"
                    )
                identities.add(core.scheduler._identity)
                yield from (
                    f"{name} is idle, and {each}" for each in _left(transfers, told._connector, is_over=is_over)
                )
                first = first_worker_of(rank)
                workers = [each for process, each in everything if process is first]
                for each in workers[-1:]:
                    yield from (f"{name} is idle, and {said}" for said in _of_worker(each, told))
                there = {block_name(digest, group) for group, each in enumerate(cache._block_of) for digest in each}
                states = [
                    digest for part in parts_of(core.scheduler, PrefixStates) for digest in part.snapshots._row_of
                ]
                there |= {block_name(digest, group) for group in transfers._state_groups for digest in states}
                if not has_adapters and told.blocks.keys() != there:
                    yield f"{name}'s connector was told of {len(told.blocks)} blocks, and there are {len(cache)}"
            for events in (part for part in core.parts if isinstance(part, KVEvents)):
                yield from _of_events(name, events, cache)
        scenario = self.run.scenario
        if len(identities) > 1 and not any(each.kind in _CHANGING for each in scenario.operations):
            yield f"ranks with the same weights name their blocks in {len(identities)} ways"
        if self._is_calm(llm):
            yield from self._of_hits(llm)

    def over(self) -> Iterator[str]:
        """What is said of a disk that is full: one warning of each worker, if it is full for less than minutes."""
        for process, transfers in transfers_of(self.run.cluster.world):
            failed_s = getattr(getattr(transfers._connector, "_files", None), "first_failed_s", None)
            said = [
                each
                for each in self.run.logged
                if each.who.startswith(f"{process.name}/") and "be written" in each.said
            ]
            if (failed_s is not None) is not bool(said):
                yield f"{process} couldn't write files at {failed_s} s, and logs {said}"

    def _is_calm(self, llm: AsyncLLM) -> bool:
        """Whether all that workers have loaded is of use to the request that it was loaded for, at first."""
        scenario, records = self.run.scenario, self.run.recorder.records
        if scenario.faults or scenario.operations or self.run.front is not None or llm._client.failure is not None:
            return False
        if any(record.is_aborted or record.error is not None for record in records):
            return False
        has_failed = any(transfers.num_failed for _, transfers in transfers_of(self.run.cluster.world))
        return not has_failed and not any(each.num_preemptions for each in llm._client._requests.counts().values())

    def _of_hits(self, llm: AsyncLLM) -> Iterator[str]:
        """What differs between what workers have loaded and what metrics say that was brought."""
        block_size = llm.config.cache.block_size
        loaded = dict.fromkeys(_SOURCES, 0)
        for _, transfers in transfers_of(self.run.cluster.world):
            for source, number in transfers.num_loaded() if transfers.is_first else ():
                loaded[source] += number * block_size
        counts = llm._client._requests.counts().values()
        counted = {source: sum(getattr(each, f"num_{source}_hits") for each in counts) for source in _SOURCES}
        if counted != loaded:
            yield f"metrics count the hits {counted}, and workers have loaded {loaded}"


def _left(transfers: Any, connector: Any, *, is_over: bool) -> Iterator[str]:
    """What a rank's connector has noted of requests, though there are none.

    `is_over`: whether no worker has anything under way.
    """
    if is_over:
        for name in ("_loading", "_loaded", "_abandoned", "_undecided", "_sending", "_step_loads", "_stored_by_step"):
            if left := getattr(transfers, name):
                yield f"it has transfers {name}: {left}"
        for name in ("_found", "_taken", "_job_slots", "_loading", "_leased", "_offered", "_pinned", "_named"):
            left = getattr(connector, name, None)
            if any(left.values()) if isinstance(left, Counter) else left:
                yield f"its connector has noted {name}: {left}"


def _of_worker(transfers: Any, told: _Told) -> Iterator[str]:
    """What a rank's worker lets others read, and has slots for, compared with what its connector knows."""
    connector: Any = told._connector
    lent = transfers.lent().get("blocks that others may read")
    there = told.blocks if getattr(connector, "_gives", False) else {}
    if lent is not None and lent != there and not connector.has_pending_push_work():
        yield f"others may read {len(lent)} blocks, and there are {len(there)}, not all the same"
    if (pool := getattr(transfers._connector, "_pool", None)) is not None:
        slots = sorted([*connector._free, *connector._slot_of.values(), *connector._forgotten])
        if slots != list(range(len(pool.blocks))):
            yield f"its connector has the slots {slots} of {len(pool.blocks)}"


class _Told:
    """A connector, and what it was told."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector
        self.requests: set[int] = set()
        """The seq_ids of those that haven't ended."""
        self.blocks: dict[bytes, int] = {}
        self.least_hits = self.most_hits = 0
        """How many tokens count as brought: at least those of requests of which nothing went wrong."""
        self._asked: dict[int, list[int]] = {}
        """By seq_id: how many tokens were asked for, each time."""
        self._kept: Counter[int] = Counter()
        """By seq_id: how many times blocks are kept, and nobody has said that they needn't be."""
        self._given_up: set[int] = set()
        """The seq_ids of those of whose end workers may tell nevertheless."""
        self._unsure: set[int] = set()
        """The seq_ids of those that may not count, or that have begun before."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connector, name)

    def on_new_request(self, request: Any) -> None:
        if request.seq_id in self.requests:
            complaints.disagrees(f"a connector is told twice of request {request.seq_id}")
        self.requests.add(request.seq_id)
        self._connector.on_new_request(request)

    def request_finished_all_groups(self, request: Any, block_ids: Sequence[Sequence[int]]) -> Any:
        if request.seq_id not in self.requests:
            complaints.disagrees(f"a connector is told twice of the end of request {request.seq_id}, or it is unknown")
        self.requests.discard(request.seq_id)
        asked, is_unsure = self._asked.pop(request.seq_id, []), request.seq_id in self._unsure
        if len(asked) == 1 and not is_unsure and not request.is_aborted and any(block_ids):
            self.least_hits += asked[0]
        self._unsure.discard(request.seq_id)
        is_kept, params = self._connector.request_finished_all_groups(request, block_ids)
        self._kept[request.seq_id] += bool(is_kept and any(block_ids))
        return is_kept, params

    def give_up_send(self) -> int | None:
        seq_id = self._connector.give_up_send()
        if seq_id is not None:
            self._given_up.add(seq_id)
        return seq_id

    def cache_lost(self) -> None:
        self._kept.clear()
        self._connector.cache_lost()

    def update_state_after_alloc_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        self._asked.setdefault(request.seq_id, []).append(num_external_tokens)
        self.most_hits += num_external_tokens
        self._connector.update_state_after_alloc_all_groups(request, block_ids, num_external_tokens)

    def load_abandoned(self, request: Any) -> None:
        self._unsure.add(request.seq_id)
        self._connector.load_abandoned(request)

    def request_preempted_all_groups(self, request: Any, block_ids: Sequence[Sequence[int]]) -> bool:
        if request.seq_id not in self._asked:
            self._unsure.add(request.seq_id)
        is_kept = self._connector.request_preempted_all_groups(request, block_ids)
        self._kept[request.seq_id] += bool(is_kept and any(block_ids))
        return is_kept

    def update_connector_output(self, result: Any) -> None:
        self._kept.subtract(result.sent)
        is_too_often = any(self._kept[seq_id] < 0 and seq_id not in self._given_up for seq_id in result.sent)
        if is_too_often or len(set(result.received)) < len(result.received):
            complaints.disagrees(f"workers report the same twice: {result}")
        if result.failed_blocks:
            self._unsure |= self.requests
        self._connector.update_connector_output(result)

    def blocks_stored_of_group(
        self, request: Any, digests: Sequence[bytes], block_ids: Sequence[int], first: int, group: int
    ) -> None:
        for digest, block in zip([block_name(digest, group) for digest in digests], block_ids, strict=True):
            if digest in self.blocks:
                complaints.disagrees(f"a connector is told twice that a block is stored: {digest.hex()} in {block}")
            self.blocks[digest] = block
        self._connector.blocks_stored_of_group(request, digests, block_ids, first, group)

    def block_removed_of_group(self, digest: bytes, group: int) -> None:
        self.blocks.pop(block_name(digest, group), None)  # those of adapters are unknown here
        self._connector.block_removed_of_group(digest, group)

    def cache_cleared(self) -> None:
        self.blocks.clear()
        self._unsure |= self.requests
        self._connector.cache_cleared()


class _Follower:
    """What somebody knows who gets all events of a rank."""

    def __init__(self) -> None:
        self.held: dict[str | None, set[tuple[int | None, bytes]]] = {}
        """By medium: groups and digests."""

    def take(self, events: Sequence[Any]) -> None:
        """Get events. Complains of those that can't be."""
        for wrong in self.follow(events):
            complaints.disagrees(wrong)

    def follow(self, events: Sequence[Any]) -> Iterator[str]:
        """Get events. Yields those that can't be."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.held.pop("GPU", None)
                continue
            held = self.held.setdefault(event.medium, set())
            for digest in event.block_hashes:
                key = event.group_idx, digest
                if isinstance(event, BlockRemoved) and key not in held:
                    yield f"an event says that a block is removed, and it wasn't there: {digest.hex()}, {event.medium}"
                elif isinstance(event, BlockStored) and key in held:
                    yield f"an event says that a block is stored, and it was there: {digest.hex()}, {event.medium}"
                (held.add if isinstance(event, BlockStored) else held.discard)(key)
            num_tokens = len(event.block_hashes) * event.block_size if isinstance(event, BlockStored) else 0
            if num_tokens and event.medium == "GPU" and len(event.token_ids) != num_tokens:
                yield f"an event has {len(event.token_ids)} tokens of {len(event.block_hashes)} blocks"


def _of_events(name: str, events: Any, cache: Any) -> Iterator[str]:
    """What is wrong with what those know who follow a rank's events. Events that it hasn't sent yet count, too."""
    known = _Follower()
    known.held = {medium: set(each) for medium, each in events.follower.held.items()}
    connector = events._connector
    yield from known.follow([*events.events, *getattr(connector, "_events", ())])
    told = known.held.get("GPU", set())
    groups = cache._block_of
    there = {(group if len(groups) > 1 else None, digest) for group, each in enumerate(groups) for digest in each}
    if told != there:
        yield f"{name} has sent events of {len(told - there)} blocks too many, and {len(there - told)} too few"
    names: dict[bytes, tuple[bytes, int]] = getattr(connector, "_told", {})
    slots = {(group if len(groups) > 1 else None, digest) for digest, group in names.values()}
    in_memory = getattr(connector, "_slot_of", {}).keys()
    # no events tell of states
    if not names.keys() <= in_memory or (names.keys() < in_memory and not connector._has_states):
        yield f"{name} doesn't know of which blocks in the host's memory events have told"
    if (told := known.held.get("CPU", set())) != slots:
        yield f"{name} has sent events of {len(told ^ slots)} other blocks in the host's memory than there are"


_make_transfers, _make_events = Transfers.__init__, KVEvents.__init__


def _init_transfers(self: Transfers, connector: Any, *args: Any, **kwargs: Any) -> None:
    _make_transfers(self, connector if kernel.the_world is None else _Told(connector), *args, **kwargs)  # pyright: ignore[reportArgumentType]


def _init_events(self: Any, *args: Any, **kwargs: Any) -> None:
    _make_events(self, *args, **kwargs)
    self.follower = _Follower()
    self.sinks.append(self.follower.take)


Transfers.__init__, KVEvents.__init__ = _init_transfers, _init_events
