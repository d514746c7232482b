"""Faults that are put into the product, one or more for each account, to show that the account names them.

`python -m simulation.cluster.planted NUM_SEEDS [FAULT ...]` plays seeds with each until a problem has the words of its
account, and prints a line for each fault. With 0 seeds, it prints the names of all faults.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import simulation.installed  # noqa: F401

# isort: split

import logging
from contextlib import nullcontext

import msgspec

from raycore.client import client
from raycore.client.ask import CheckedAsk
from raycore.client.client import EngineClient
from raycore.client.held_prefixes import HeldPrefixes
from raycore.client.output_processor import OutputProcessor
from raycore.client.recorder import Recorder
from raycore.client.request_table import RequestTable
from raycore.client.reserved_ids import ReservedIds
from raycore.client.routing import Router
from raycore.client.streams import Streams, _LoopStreams, _Stream
from raycore.client.updates import Update
from raycore.cluster import failure_reports, logs, process_watch
from raycore.cluster.cluster_watch import ClusterWatch
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.monitor import RankMonitor
from raycore.cluster.process_watch import Ends
from raycore.cluster.rank_ends import RankEnds
from raycore.cluster.reservations import Reservations
from raycore.cluster.restart_budget import RestartBudget
from raycore.cluster.runtime import RayRuntime
from raycore.control import program, ranks
from raycore.engine import cache_size
from raycore.engine.mailbox import Mailbox, _Outbox
from raycore.engine.progress import LoopProgress
from raycore.kvcache.block_table import BlockTable
from raycore.kvcache.cache_log import CacheLog
from raycore.metrics.periodic import Periodic
from raycore.metrics.stat_loggers import StatLoggers
from raycore.metrics.throughput_log import ThroughputLog
from raycore.parts.constraints.engine import GrammarsUnderWay
from raycore.parts.drafts.scheduler.speculation import Speculation
from raycore.parts.experts.cluster import CannotMove, GroupScaling
from raycore.parts.transfers.connectors.offload import files
from raycore.parts.transfers.connectors.offload.files import BlockFiles
from raycore.parts.transfers.connectors.offload.scheduler import OffloadScheduler
from raycore.parts.transfers.connectors.offload.worker import _Writer
from raycore.parts.transfers.connectors.peers import reader
from raycore.parts.transfers.connectors.peers.blocks import HeldBlocks
from raycore.parts.transfers.connectors.peers.reader import BlockReader
from raycore.parts.transfers.connectors.peers.scheduler_side import DisaggregationScheduler
from raycore.parts.transfers.connectors.peers.server import BlockServer
from raycore.parts.transfers.connectors.peers.wire import Broken
from raycore.parts.transfers.connectors.peers.worker_side import Leases, PeersWorker
from raycore.parts.transfers.scheduler.cache_events import CacheEvents
from raycore.parts.transfers.scheduler.transfers import Transfers
from raycore.parts.weights.cluster import EngineWeights
from raycore.rpc.client import SentCall
from raycore.scheduler.slots import SlotTable
from raycore.scheduler.step_builder import StepBuilder
from raycore.system import asyncio, threading
from simulation.apart import Died, run_all_apart
from simulation.putting_in import substitute

_LIMIT_S = 600.0


def a_block_is_not_freed() -> None:
    original = BlockTable.end

    def end(self: BlockTable, slot: int) -> None:
        rows = self.rows(slot)
        if len(rows) > 2:
            self.pool._num_references[rows[-1]] += 1
        original(self, slot)

    substitute(BlockTable, "end", end)


def a_slot_is_not_freed() -> None:
    original = SlotTable.leave

    def leave(self: SlotTable, leaving: Any) -> None:
        original(self, leaving)
        if self.num_departures == 3:
            self._free.pop()

    substitute(SlotTable, "leave", leave)


def the_client_keeps_sequences() -> None:
    substitute(OutputProcessor, "_drop_seq_id", lambda self, seq_id: self._sequences.pop(seq_id, None))


def streams_are_not_closed() -> None:
    substitute(_LoopStreams, "close", lambda self, request_id: None)


def tasks_are_left_on_loops() -> None:
    original = Streams.add

    async def add(self: Streams, *args: Any, **kwargs: Any) -> Any:
        self.left = asyncio.ensure_future(asyncio.sleep(1000.0))  # pyright: ignore[reportAttributeAccessIssue]
        return await original(self, *args, **kwargs)

    substitute(Streams, "add", add)


def timers_are_left_on_loops() -> None:
    original = Streams.add

    async def add(self: Streams, *args: Any, **kwargs: Any) -> Any:
        asyncio.get_running_loop().call_later(1000.0, print)
        return await original(self, *args, **kwargs)

    substitute(Streams, "add", add)


def a_thread_is_not_told_to_end() -> None:
    substitute(Periodic, "stop", lambda self: None)


def a_thread_is_started_for_each_request() -> None:
    original = Streams.add

    async def add(self: Streams, *args: Any, **kwargs: Any) -> Any:
        threading.Thread(target=threading.Event().wait, name="raycore-request", daemon=True).start()
        return await original(self, *args, **kwargs)

    substitute(Streams, "add", add)


def ends_of_processes_are_noted_again_and_again() -> None:
    original = Ends._note_end

    def note_end(self: Ends, rank: Any, pid: int) -> None:
        for _ in range(20):
            original(self, rank, pid)

    substitute(Ends, "_note_end", note_end)


def a_pidfd_is_not_closed() -> None:
    original = Ends.close

    def close(self: Ends) -> None:
        for number in list(self._processes)[:1]:
            del self._processes[number]
        original(self)

    substitute(Ends, "close", close)


def files_are_left_open() -> None:
    original = Ends.close
    opened: list[Any] = []

    def close(self: Ends) -> None:
        opened.append(open("/dev/zero", "rb"))  # noqa: SIM115
        original(self)

    substitute(Ends, "close", close)


def groups_are_left_to_the_end_of_the_program() -> None:
    substitute(Reservations, "_remove", lambda self, given: None)


def a_failed_start_leaves_its_groups() -> None:
    groups_are_left_to_the_end_of_the_program()


def ranks_are_left_to_the_end_of_the_program() -> None:
    substitute(CoreEngineActorManager, "give_back", lambda self, timeout_s=0.0: None)


def prompts_count_twice() -> None:
    original = Recorder.take

    def take(self: Recorder, dp_rank: int, before: Any, load: Any, step: Any) -> None:
        original(self, dp_rank, before, load, step)
        for each in step.first_tokens:
            self._ranks[dp_rank].num_prompt_tokens += len(each.request.prompt_token_ids)

    substitute(Recorder, "take", take)


def aborted_requests_are_not_counted() -> None:
    substitute(Recorder, "drop", lambda self, *args: None)


def tokens_count_twice() -> None:
    original = Recorder.take

    def take(self: Recorder, dp_rank: int, before: Any, load: Any, step: Any) -> None:
        original(self, dp_rank, before, load, step)
        if step.ended:
            self._ranks[dp_rank].num_output_tokens += sum(each.num_tokens for each in step.arrivals)

    substitute(Recorder, "take", take)


def loggers_miss_batches_with_ends() -> None:
    original = StatLoggers.put

    def put(self: StatLoggers, dp_rank: int, scheduler: Any, iteration: Any) -> None:
        if not iteration.finished_requests:
            original(self, dp_rank, scheduler, iteration)

    substitute(StatLoggers, "put", put)


def requests_stay_on_the_books_of_ranks() -> None:
    original = Router.finish

    def finish(self: Router, rank: int) -> None:
        if self._counts.get(rank) is not None and self._counts[rank].own != 2:
            original(self, rank)

    substitute(Router, "finish", finish)


def readers_of_streams_are_not_woken() -> None:
    def put(self: _Stream, update: Any) -> None:
        self._update = update

    substitute(_Stream, "put", put)


def pauses_wait_for_a_notice_that_does_not_come() -> None:
    substitute(EngineClient, "complete_pause", lambda self, *_: threading.Event().wait())


def outputs_are_delivered_again() -> None:
    original = EngineClient._deliver

    def deliver(self: EngineClient, connection: Any, batch: Any) -> None:
        original(self, connection, batch)
        requests = self._requests._outputs._requests
        for name, each in list(self._requests._underway.items()):
            if each.dp_rank == connection.dp_rank and requests[name].stream:
                each.sink([Update(name, requests[name].output())])

    substitute(EngineClient, "_deliver", deliver)


def a_batch_is_counted_twice() -> None:
    original = _Outbox.take

    def take(self: _Outbox, connection: int, timeout_s: float) -> Any:
        batch = original(self, connection, timeout_s)
        self._num_taken += batch is not None and self._num_taken == 2
        return batch

    substitute(_Outbox, "take", take)


def lost_ranks_are_not_replaced() -> None:
    substitute(RankMonitor, "_replace", lambda self, loss: self._leaving.wait() and False)


def ranks_get_no_weights_from_others() -> None:
    substitute(EngineWeights, "_donors", lambda self, number: [])


def a_wait_for_room_counts_as_a_restart() -> None:
    substitute(RestartBudget, "give_back", lambda self: None)


def shutdowns_wait_for_the_control_store() -> None:
    substitute(RayRuntime, "is_connected", lambda self: True)


def the_end_of_the_own_node_is_not_noticed() -> None:
    substitute(ClusterWatch, "_watch_own_node", lambda self: None)


def stuck_workers_are_not_noticed_in_long_work() -> None:
    substitute(LoopProgress, "long_work", lambda self: nullcontext())


def workers_are_not_told_of_requests_that_left() -> None:
    original = GrammarsUnderWay.drop

    def drop(self: GrammarsUnderWay, seq_id: int) -> None:
        original(self, seq_id)
        self._dropped.clear()

    substitute(GrammarsUnderWay, "drop", drop)


def clients_forget_what_ranks_tell_of_their_caches() -> None:
    original = HeldPrefixes.take
    substitute(HeldPrefixes, "take", lambda self, rank, news: original(self, rank, news) if news.is_whole else None)


def ranks_do_not_tell_what_their_caches_lose() -> None:
    substitute(CacheLog, "removed", lambda self, digests: None)


def blocks_are_lent_that_were_given_up() -> None:
    substitute(HeldBlocks, "clear", lambda self: None)


def aborted_requests_count_as_a_load() -> None:
    substitute(client, "_known_load", lambda said, num_own: msgspec.structs.replace(said, num_running=1))


def operators_are_told_of_other_processes() -> None:
    original = ranks.RankStatus

    def status(*args: Any, pid: int | None, **more: Any) -> Any:
        return original(*args, pid=pid and pid + 1, **more)

    substitute(ranks, "RankStatus", status)


def callers_get_what_they_have_not_asked_for() -> None:
    original = OutputProcessor.add

    def add(self: OutputProcessor, checked: CheckedAsk, *args: Any) -> None:
        original(self, checked, *args)
        self._requests[checked.request_id].prompt_logprobs = []

    substitute(OutputProcessor, "add", add)


def blocks_of_other_ranks_are_taken_for_wrong() -> None:
    substitute(reader, "checksum", lambda digest, data: -1)


def drafts_are_counted_as_longer() -> None:
    original = Speculation.count
    substitute(Speculation, "count", lambda self, slots, lengths, right: original(self, slots, lengths + 1, right))


def written_bytes_are_counted_twice() -> None:
    original = _Writer.write

    def write(self: _Writer, digest: bytes, data: Any) -> None:
        self._num_waiting_bytes += len(data)
        original(self, digest, data)

    substitute(_Writer, "write", write)


def files_of_blocks_fill_the_disk() -> None:
    substitute(BlockFiles, "_has_room", lambda self, size: True)


def temporary_files_stay() -> None:
    substitute(files.os, "unlink", lambda path: None)


def prompts_in_pieces_do_not_hear_of_a_failure() -> None:
    substitute(ReservedIds, "fail", lambda self, error: None)


def wishes_for_ranks_are_forgotten() -> None:
    original = RequestTable.add

    def add(self: RequestTable, checked: CheckedAsk, *args: Any) -> None:
        original(self, dataclasses.replace(checked, wanted_rank=None), *args)

    substitute(RequestTable, "add", add)


def failed_engines_list_no_ranks() -> None:
    original = CoreEngineActorManager.give_back

    def give_back(self: CoreEngineActorManager, timeout_s: float = 0.0) -> None:
        original(self, timeout_s)
        self.ranks = {}

    substitute(CoreEngineActorManager, "give_back", give_back)


def ranks_stay_on_crowded_nodes() -> None:
    substitute(Reservations, "_leave_crowded_nodes", lambda *_: None)


def leases_that_come_late_are_kept() -> None:
    original = Leases.add

    def add(self: Leases, leases: Any) -> None:
        self._early.clear()
        original(self, leases)

    substitute(Leases, "add", add)


def lent_blocks_are_not_taken_back() -> None:
    substitute(DisaggregationScheduler, "give_up_send", lambda self: None)


def tickets_of_requests_that_have_ended_are_kept() -> None:
    original = DisaggregationScheduler.request_finished_all_groups

    def request_finished_all_groups(self: DisaggregationScheduler, request: Any, block_ids: Any) -> Any:
        named = dict(self._named)
        answer = original(self, request, block_ids)
        self._named |= named
        return answer

    substitute(DisaggregationScheduler, "request_finished_all_groups", request_finished_all_groups)


def ranks_that_are_shut_down_count_as_lost() -> None:
    substitute(RankMonitor, "leave", lambda self: None)


def a_class_that_has_raised_is_told_no_more() -> None:
    original = StatLoggers._call

    def call(self: StatLoggers, target: Any, *args: Any, **kwargs: Any) -> None:
        if type(target).__name__ not in {name for name, *_ in self._failures._said}:  # pyright: ignore
            original(self, target, *args, **kwargs)

    substitute(StatLoggers, "_call", call)


def aborts_miss_prompts_in_pieces() -> None:
    substitute(ReservedIds, "abort", lambda self, request_ids: None)


def aborts_count_nothing() -> None:
    original = EngineClient.abort_groups

    def abort_groups(self: EngineClient, request_ids: Any) -> int:
        original(self, request_ids)
        return 0

    substitute(EngineClient, "abort_groups", abort_groups)


def blocks_are_stored_twice() -> None:
    original = Transfers.plan_finished

    def plan_finished(self: Transfers, plan: Any) -> None:
        self._stored_by_step *= 2
        original(self, plan)

    substitute(Transfers, "plan_finished", plan_finished)


def what_is_brought_is_not_counted() -> None:
    substitute(Transfers, "_count", lambda self, request, num_asked, num_brought: None)


def connectors_do_not_hear_of_ends_before_the_begin() -> None:
    original = Transfers._finish

    def finish(self: Transfers, request: Any, blocks: list[list[int]] | None = None) -> bool:
        return blocks is not None and any(blocks) and original(self, request, blocks)

    substitute(Transfers, "_finish", finish)


def removals_are_told_twice() -> None:
    original = CacheEvents.block_removed

    def block_removed(self: CacheEvents, digest: bytes, group: int) -> None:
        original(self, digest, group)
        self._events.append(self._events[-1])

    substitute(CacheEvents, "block_removed", block_removed)


def reads_are_told_twice() -> None:
    original = PeersWorker.get_finished

    def get_finished(self: PeersWorker) -> tuple[list[int], list[int]]:
        found = original(self)
        self._arrived *= 2
        return found

    substitute(PeersWorker, "get_finished", get_finished)


def reads_are_refused() -> None:
    def welcome(self: BlockServer, reader: Any) -> None:
        raise Broken("nobody reads here")

    substitute(BlockServer, "_welcome", welcome)


def a_worker_listens_after_its_shutdown() -> None:
    substitute(BlockServer, "close", BlockServer.release)


def shared_memory_stays_open() -> None:
    substitute(reader.os, "close", lambda number: None)


def sockets_that_do_not_connect_stay_open() -> None:
    original = reader._connect

    def connect(address: Any, deadline_s: float) -> Any:
        reader.socket.socket(reader.socket.AF_UNIX, reader.socket.SOCK_STREAM)
        return original(address, deadline_s)

    substitute(reader, "_connect", connect)


def a_rank_makes_a_mistake() -> None:
    substitute(Transfers, "result_applied", lambda self: None)


def calls_call_back_twice() -> None:
    original = SentCall.add_done_callback

    def add_done_callback(self: Any, callback: Any) -> None:
        original(self, callback)
        self.callbacks.append(callback)

    substitute(SentCall, "add_done_callback", add_done_callback)


def streams_are_left_open() -> None:
    substitute(Mailbox, "close", lambda self: None)


def requests_go_to_any_rank() -> None:
    original = Router._choose
    substitute(Router, "_choose", lambda self, found, among: original(self, (), among))


def preemptions_are_not_told() -> None:
    original = OutputProcessor._note_starts

    def note_starts(self: OutputProcessor, batch: Any) -> None:
        batch.preempted = []
        original(self, batch)

    substitute(OutputProcessor, "_note_starts", note_starts)


def throughput_counts_from_the_beginning() -> None:
    original = ThroughputLog.report

    def report(self: ThroughputLog) -> None:
        self._before = {}
        original(self)

    substitute(ThroughputLog, "report", report)


def an_engine_says_lines_twice() -> None:
    original = cache_size.describe_cache
    substitute(cache_size, "describe_cache", lambda *args: "\n".join([original(*args)] * 2))


def groups_of_lost_ranks_are_kept() -> None:
    substitute(Reservations, "_kept", lambda self, ranks, is_wanted: {})


def control_actors_are_started_again_at_once() -> None:
    substitute(program, "_RETRY_S", 0.0)


def experts_are_never_moved() -> None:
    def move(self: GroupScaling, num_ranks: int) -> None:
        raise CannotMove("for no reason")

    substitute(GroupScaling, "move", move)


def a_shutdown_does_not_wait_for_its_threads() -> None:
    substitute(ClusterWatch, "join", lambda self, timeout_s: None)


def ranks_that_have_stopped_are_not_ended() -> None:
    substitute(RayRuntime, "end", staticmethod(lambda actor: None))


def lost_ranks_are_not_killed() -> None:
    substitute(RankEnds, "kill", lambda self, rank, own_node: None)


def explanations_say_all_that_ray_says() -> None:
    substitute(failure_reports, "_actor_death", lambda text: text)


def explanations_have_no_cause() -> None:
    original = process_watch._loss

    def loss(*args: Any) -> Any:
        dead = original(*args)
        dead.__cause__ = None
        return dead

    substitute(process_watch, "_loss", loss)


def logs_of_this_node_are_not_read() -> None:
    substitute(logs, "read_log", lambda logs_dir, pid: [])


def requests_begin_twice() -> None:
    original = StepBuilder.finish

    def finish(self: StepBuilder, *args: Any, **kwargs: Any) -> Any:
        self.new_requests *= 2
        return original(self, *args, **kwargs)

    substitute(StepBuilder, "finish", finish)


def others_read_blocks_that_are_gone() -> None:
    substitute(HeldBlocks, "remove", lambda self, digests: None)


def readers_that_are_gone_count() -> None:
    original = BlockServer._serve

    def serve(self: BlockServer, connection: Any) -> None:
        original(self, connection)
        self._readers.add(connection)

    substitute(BlockServer, "_serve", serve)


def connections_are_lost() -> None:
    substitute(BlockReader, "_give_back", lambda self, *_, **__: None)


def slots_of_the_host_memory_are_lost() -> None:
    substitute(OffloadScheduler, "_unpin", lambda self, slots: None)


def a_full_disk_is_not_logged() -> None:
    substitute(files.logger, "warning", lambda *_: None)


def what_nobody_waits_for_is_loaded() -> None:
    substitute(BlockReader, "cancel", lambda self, key: None)


WORDS: dict[Callable[[], None], str] = {
    a_block_is_not_freed: "is idle, and has references to blocks",
    a_slot_is_not_freed: "is idle, and has slots that aren't free",
    the_client_keeps_sequences: "the client keeps tokens of sequences",
    streams_are_not_closed: "the client keeps open streams",
    tasks_are_left_on_loops: "an event loop ends with tasks",
    timers_are_left_on_loops: "an event loop ends with timers",
    a_thread_is_not_told_to_end: "the thread raycore-ray-metrics waits for",
    a_thread_is_started_for_each_request: "threads raycore-request",
    ends_of_processes_are_noted_again_and_again: "ends of processes: there are",
    a_pidfd_is_not_closed: "the driver has the descriptors",
    files_are_left_open: "real files are open",
    groups_are_left_to_the_end_of_the_program: "its program goes on: the group",
    a_failed_start_leaves_its_groups: "the engine didn't start, and its program goes on: the group",
    ranks_are_left_to_the_end_of_the_program: "its program goes on: the actor",
    prompts_count_twice: "prompt tokens, not",
    aborted_requests_are_not_counted: "the client keeps times of tokens",
    tokens_count_twice: "output tokens, not",
    loggers_miss_batches_with_ends: "stat loggers were told of",
    requests_stay_on_the_books_of_ranks: "the client keeps requests on ranks",
    readers_of_streams_are_not_woken: "r0 never ended, though all faults are over",
    pauses_wait_for_a_notice_that_does_not_come: "wake_up never ended, though all faults are over",
    outputs_are_delivered_again: "got the same output twice",
    a_batch_is_counted_twice: "were delivered",
    lost_ranks_are_not_replaced: "more ranks, and there are: dp_rank",
    ranks_get_no_weights_from_others: "is stale, and dp_rank",
    a_wait_for_room_counts_as_a_restart: "was given up after",
    shutdowns_wait_for_the_control_store: "the shutdown, took",
    the_end_of_the_own_node_is_not_noticed: "after the end of its engine's node, took",
    stuck_workers_are_not_noticed_in_long_work: "wake_up, took",
    workers_are_not_told_of_requests_that_left: "s after the last of",
    prompts_in_pieces_do_not_hear_of_a_failure: "s after its engine had failed",
    wishes_for_ranks_are_forgotten: ", and wanted dp_rank",
    clients_forget_what_ranks_tell_of_their_caches: "a client believes of dp_rank",
    ranks_do_not_tell_what_their_caches_lose: "blocks that it doesn't hold",
    blocks_are_lent_that_were_given_up: "blocks of a cache that has just been allocated",
    aborted_requests_count_as_a_load: "is idle, and its client has the view",
    operators_are_told_of_other_processes: ", and operators are told RankStatus",
    failed_engines_list_no_ranks: "has failed, and lists",
    ranks_stay_on_crowded_nodes: "was placed last, on a node of",
    leases_that_come_late_are_kept: "that its reader has given back",
    lent_blocks_are_not_taken_back: "wait for blocks that it keeps for others",
    callers_get_what_they_have_not_asked_for: "has prompt logprobs, and hasn't asked for any",
    blocks_of_other_ranks_are_taken_for_wrong: "doesn't get blocks of another rank",
    written_bytes_are_counted_twice: "bytes to be written",
    drafts_are_counted_as_longer: "of drafts, and its worker",
    files_of_blocks_fill_the_disk: "files of blocks have",
    temporary_files_stay: "temporary files of an earlier engine",
    ranks_that_are_shut_down_count_as_lost: "nothing has broken, and",
    a_class_that_has_raised_is_told_no_more: "batches, and others of",
    aborts_miss_prompts_in_pieces: "and went on",
    aborts_count_nothing: "says that it aborted 0",
    blocks_are_stored_twice: "is told twice that a block is stored",
    what_is_brought_is_not_counted: "counts 0 tokens that its connector has brought",
    connectors_do_not_hear_of_ends_before_the_begin: "hasn't heard of the end of",
    removals_are_told_twice: "an event says that a block is removed, and it wasn't there",
    reads_are_told_twice: ", and tells of",
    reads_are_refused: "doesn't get blocks of another rank",
    a_worker_listens_after_its_shutdown: "still listens for others",
    shared_memory_stays_open: "of shared memory",
    sockets_that_do_not_connect_stay_open: "sockets that are neither connected nor listen",
    a_rank_makes_a_mistake: "TypeError in ",
    requests_begin_twice: "with slots to begin twice",
    calls_call_back_twice: "has called back 2 times",
    streams_are_left_open: "open streams when it is killed",
    requests_go_to_any_rank: "tokens of its prompt, and another",
    preemptions_are_not_told: "preemptions, and requests 0",
    throughput_counts_from_the_beginning: "num_output_tokens meanwhile",
    an_engine_says_lines_twice: "has a line twice",
    groups_of_lost_ranks_are_kept: "groups for",
    control_actors_are_started_again_at_once: "and another one was started at",
    experts_are_never_moved: "though nothing has broken, and the engine",
    a_shutdown_does_not_wait_for_its_threads: "goes on when the shutdown is over",
    ranks_that_have_stopped_are_not_ended: "a shutdown in which nothing has broken, took",
    lost_ranks_are_not_killed: "in the place of",
    explanations_say_all_that_ray_says: "of Ray's: ",
    explanations_have_no_cause: "and the explanation has no cause",
    logs_of_this_node_are_not_read: "an explanation hasn't",
    others_read_blocks_that_are_gone: "others may read",
    readers_that_are_gone_count: "has readers that are gone",
    connections_are_lost: "has connections that nobody keeps",
    slots_of_the_host_memory_are_lost: "has noted _pinned",
    tickets_of_requests_that_have_ended_are_kept: "has noted _named",
    a_full_disk_is_not_logged: "couldn't write files at",
    what_nobody_waits_for_is_loaded: "that doesn't wait for it any more",
}
"""What a problem has to say, by the fault."""
DEPLOYMENTS: dict[Callable[[], None], str] = {
    a_failed_start_leaves_its_groups: "starts",
    lost_ranks_are_not_replaced: "lost_nodes",
    ranks_get_no_weights_from_others: "lost_nodes",
    a_wait_for_room_counts_as_a_restart: "lost_nodes",
    shutdowns_wait_for_the_control_store: "shutdowns",
    the_end_of_the_own_node_is_not_noticed: "own_node",
    stuck_workers_are_not_noticed_in_long_work: "sleeps",
    clients_forget_what_ranks_tell_of_their_caches: "peers",
    ranks_do_not_tell_what_their_caches_lose: "peers",
    blocks_are_lent_that_were_given_up: "peers",
    failed_engines_list_no_ranks: "own_node",
    ranks_stay_on_crowded_nodes: "strict",
    leases_that_come_late_are_kept: "peers",
    lent_blocks_are_not_taken_back: "peers",
    blocks_of_other_ranks_are_taken_for_wrong: "peers",
    written_bytes_are_counted_twice: "offload",
    files_of_blocks_fill_the_disk: "offload",
    removals_are_told_twice: "offload",
    temporary_files_stay: "offload",
    slots_of_the_host_memory_are_lost: "offload",
    tickets_of_requests_that_have_ended_are_kept: "tickets",
    a_full_disk_is_not_logged: "offload",
    **dict.fromkeys(
        (
            blocks_are_stored_twice,
            what_is_brought_is_not_counted,
            connectors_do_not_hear_of_ends_before_the_begin,
            reads_are_told_twice,
            reads_are_refused,
            a_worker_listens_after_its_shutdown,
            shared_memory_stays_open,
            sockets_that_do_not_connect_stay_open,
            a_rank_makes_a_mistake,
            others_read_blocks_that_are_gone,
            readers_that_are_gone_count,
            connections_are_lost,
            what_nobody_waits_for_is_loaded,
        ),
        "peers",
    ),
    requests_go_to_any_rank: "returning",
    preemptions_are_not_told: "returning",
    groups_of_lost_ranks_are_kept: "updates",
    experts_are_never_moved: "regroups",
    lost_ranks_are_not_killed: "experts",
}
"""By the fault: in which engines seeds look for it, if these aren't plain."""
KNOWN: dict[Callable[[], None], list[int]] = {
    a_slot_is_not_freed: [2],
    a_failed_start_leaves_its_groups: [1],
    aborted_requests_are_not_counted: [8],
    loggers_miss_batches_with_ends: [2],
    requests_stay_on_the_books_of_ranks: [2],
    readers_of_streams_are_not_woken: [1],
    pauses_wait_for_a_notice_that_does_not_come: [2],
    lost_ranks_are_not_replaced: [1],
    ranks_get_no_weights_from_others: [1],
    shutdowns_wait_for_the_control_store: [4],
    the_end_of_the_own_node_is_not_noticed: [7],
    outputs_are_delivered_again: [2],
    stuck_workers_are_not_noticed_in_long_work: [1],
    a_wait_for_room_counts_as_a_restart: [13],
    workers_are_not_told_of_requests_that_left: [248],
    prompts_in_pieces_do_not_hear_of_a_failure: [17],
    wishes_for_ranks_are_forgotten: [22],
    drafts_are_counted_as_longer: [30],
    ranks_stay_on_crowded_nodes: [1],
    leases_that_come_late_are_kept: [21],
    lent_blocks_are_not_taken_back: [20],
    a_class_that_has_raised_is_told_no_more: [14],
    aborts_miss_prompts_in_pieces: [112],
    reads_are_refused: [15],
    connectors_do_not_hear_of_ends_before_the_begin: [9],
    removals_are_told_twice: [3],
    calls_call_back_twice: [1],
    streams_are_left_open: [2],
    preemptions_are_not_told: [6],
    throughput_counts_from_the_beginning: [9],
    control_actors_are_started_again_at_once: [71],
    experts_are_never_moved: [1],
    lost_ranks_are_not_killed: [3],
    clients_forget_what_ranks_tell_of_their_caches: [6],
    ranks_do_not_tell_what_their_caches_lose: [6],
    others_read_blocks_that_are_gone: [6],
    readers_that_are_gone_count: [12],
    slots_of_the_host_memory_are_lost: [18],
    tickets_of_requests_that_have_ended_are_kept: [15],
    a_full_disk_is_not_logged: [1],
    what_nobody_waits_for_is_loaded: [168],
}
"""Seeds that have found what few find. They look first."""


def find(plant: Callable[[], None], num_seeds: int) -> str:
    """The problem that names a fault, with its seed. Raises LookupError if there is none."""
    from simulation.cluster.deployments import PLAIN
    from simulation.cluster.making import scenario_of
    from simulation.cluster.play import play

    plant()
    other, capability = "", DEPLOYMENTS.get(plant, PLAIN)
    for seed in [*KNOWN.get(plant, ()), *range(num_seeds)]:
        ((_, outcome),) = run_all_apart([(seed, partial(play, scenario_of(seed, capability=capability)))], 1, _LIMIT_S)
        problems = [outcome.reason] if isinstance(outcome, Died) else outcome.problems
        for each in problems:
            if WORDS[plant] in each:
                return f"seed {seed}: {each}"
            other = other or each
    raise LookupError(f"no problem says {WORDS[plant]!r}, but: {other or 'nothing'}")


def main() -> int:
    logging.getLogger("raycore").setLevel(logging.CRITICAL)
    num_seeds, names = int(sys.argv[1]), sys.argv[2:]
    if not num_seeds:
        print(*(each.__name__ for each in WORDS), sep="\n")
        return 0
    chosen = [each for each in WORDS if not names or each.__name__ in names]
    works = [(each.__name__, partial(find, each, num_seeds)) for each in chosen]
    num_missed = 0
    for name, found in run_all_apart(works, 1, 6 * _LIMIT_S):
        is_missed = isinstance(found, Died)
        num_missed += is_missed
        print(f"{name}: {'NOT FOUND: ' + found.reason.strip().splitlines()[-1] if is_missed else found}", flush=True)
    return bool(num_missed)


if __name__ == "__main__":
    sys.exit(main())
