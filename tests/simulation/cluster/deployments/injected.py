"""Faults that are put into the product, to show that seeds of a deployment find them.

    python -m simulation.cluster.deployments.injected --seeds 30 --faults NAME ...

with `tests` on the path. Each is one that a change could bring in. Prints for each the first seed that shows it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from simulation.apart import Died, run_all_apart
from simulation.installation import install
from simulation.putting_in import substitute

_LIMIT_S = 600.0


def a_worker_computes_an_old_plan() -> None:
    from raycore.rpc import server

    original, number = server.decode_plan, itertools.count(1)
    last: list[Any] = []

    def decode(payload: bytes) -> Any:
        plan = original(payload)
        last.append(plan)
        if len(last) > 2 and next(number) % 7 == 0 and plan.slots and len(plan.slots) == len(last[-2].slots):
            plan.slots = last[-2].slots[::-1]
        return plan

    substitute(server, "decode_plan", decode)


def a_rank_without_requests_leaves_a_wave() -> None:
    from raycore.engine.core import EngineCore

    original, number = EngineCore.lockstep_step, itertools.count(1)

    def lockstep_step(self: EngineCore, **options: Any) -> Any:
        if not self.has_work() and next(number) % 5 == 0:
            return None, False
        return original(self, **options)

    substitute(EngineCore, "lockstep_step", lockstep_step)


def ranks_are_not_told_of_a_wave() -> None:
    from raycore.parts.experts.engine.waves import Waves

    substitute(Waves, "start_wave", lambda self, wave: None)


def a_server_that_is_gone_is_not_noticed() -> None:
    from raycore.parts.servers.cluster.coordinator import Coordinator

    substitute(Coordinator, "look", lambda self: None)


def ranks_of_other_servers_are_not_told_of_a_wave() -> None:
    from raycore.parts.servers.cluster.coordinator import Coordinator

    original = Coordinator.others

    @wraps(original)
    def others(self: Coordinator, round_id: str, server_id: str, actors: Any) -> list[Any]:
        original(self, round_id, server_id, actors)
        return []

    substitute(Coordinator, "others", others)


def a_wave_ends_though_a_rank_is_busy() -> None:
    from raycore.parts.experts.engine.waves import Waves

    original, number = Waves.step_done, itertools.count(1)

    def step_done(self: Waves, is_busy: bool, num_in_flight: int) -> None:
        original(self, is_busy and next(number) % 20 != 0, num_in_flight)

    substitute(Waves, "step_done", step_done)


def damaged_files_count() -> None:
    from raycore.parts.transfers.connectors.offload.files import BlockFiles

    original = BlockFiles.read

    def read(self: BlockFiles, digest: bytes, pages: Any) -> bool:
        is_there = self.path(digest).exists()
        if original(self, digest, pages) and pages:
            pages[0][0] ^= 1  # few files are damaged before they are read: here all are
        return is_there

    substitute(BlockFiles, "read", read)


def a_load_is_reported_before_it_ends() -> None:
    from raycore.parts.transfers.connectors.offload.worker import _Reader

    original = _Reader.start

    def start(self: _Reader, running: Any) -> None:
        original(self, running)
        self._done.append(running)

    substitute(_Reader, "start", start)


def a_block_is_saved_before_it_is_complete() -> None:
    from raycore.parts.transfers.connectors.offload.worker import OffloadWorker

    original = OffloadWorker._save

    def save(self: OffloadWorker, saves: list[Any]) -> None:
        original(self, saves)
        assert self._pool is not None
        for each in saves[-1:]:
            if each.slot >= 0:
                self._pool.blocks[each.slot][64:] = 0

    substitute(OffloadWorker, "_save", save)


def blocks_that_did_not_arrive_count() -> None:
    from raycore.parts.transfers.connectors.peers.worker_side import PeersWorker

    substitute(PeersWorker, "get_block_ids_with_load_errors", lambda self: [])


def a_block_is_taken_for_another_one() -> None:
    from raycore.parts.transfers.connectors.peers.reader import BlockReader

    original = BlockReader._write

    def write(self: BlockReader, job: Any, block: int, data: Any) -> bool:
        return original(self, job, job.blocks[-1 - job.blocks.index(block)], data)

    substitute(BlockReader, "_write", write)


def blocks_that_a_step_did_not_load_count() -> None:
    from raycore.parts.transfers.scheduler.transfers import Transfers

    original = Transfers.settle
    substitute(Transfers, "settle", lambda self, step, failed_blocks: original(self, step, ()))


def a_state_that_did_not_arrive_counts() -> None:
    from raycore.parts.transfers.scheduler.transfers import Transfers

    substitute(Transfers, "_trim", lambda self, load: True)


def kept_blocks_are_given_to_others() -> None:
    from raycore.parts.transfers.scheduler.transfers import Transfers

    original = Transfers.left

    def left(self: Transfers, request: Any, slot: int, *, is_over: bool) -> None:
        original(self, request, slot, is_over=is_over)
        for kept in self._sending.pop(request.seq_id, ()):
            self._release(kept)

    substitute(Transfers, "left", left)


def a_prefix_gets_the_state_of_another_one() -> None:
    from raycore.scheduler.prefix_states import PrefixStates

    original = PrefixStates._save

    def save(self: PrefixStates, request: Any, num_tokens: int) -> None:
        original(self, request, num_tokens)
        if self._saves and num_tokens > self._block_size:
            slot, count, row = self._saves[-1]
            self._saves[-1] = slot, count - 1, row

    substitute(PrefixStates, "_save", save)


def an_api_server_that_ends_is_not_replaced() -> None:
    from raycore.server.multi_process.api_servers import _ServerMonitor

    original = _ServerMonitor._watch

    def watch(self: _ServerMonitor, process: Any) -> None:
        try:
            original(self, process)
        except Exception:
            self._leaving.set()

    substitute(_ServerMonitor, "_watch", watch)


def ranks_keep_the_requests_of_an_api_server_that_ended() -> None:
    from raycore.client.client import EngineClient

    substitute(EngineClient, "forget_client", lambda self, client_index: None)


def requests_of_other_api_servers_are_not_aborted() -> None:
    from raycore.client.group import ClientGroup

    substitute(ClientGroup, "abort_requests", lambda self, request_ids: self._own.abort_groups(request_ids))


def an_api_server_is_not_told_of_ranks_that_come_back() -> None:
    from raycore.engine.rank_events import RankUp
    from raycore.server.multi_process.api_servers import _Process

    original, number = _Process.on_rank_event, itertools.count(1)

    def on_rank_event(self: _Process, event: Any) -> None:
        if not (isinstance(event, RankUp) and next(number) > 8):
            original(self, event)

    substitute(_Process, "on_rank_event", on_rank_event)


def counts_of_api_servers_are_lost() -> None:
    from raycore.server.multi_process.api_servers import _Process

    original = _Process.counts
    substitute(_Process, "counts", lambda self: {rank: each for rank, each in original(self).items() if not rank})


def what_a_worker_refuses_is_the_callers_mistake() -> None:
    from raycore.cluster import rank_starts

    class Nothing(Exception):
        pass

    substitute(rank_starts, "WorkerFailed", Nothing)


FAULTS: dict[str, tuple[str, Callable[[], None]]] = {
    each.__name__: (capability, each)
    for capability, faults in {
        "pipeline": [a_worker_computes_an_old_plan],
        "experts": [
            a_rank_without_requests_leaves_a_wave,
            ranks_are_not_told_of_a_wave,
            a_wave_ends_though_a_rank_is_busy,
        ],
        "models": [a_prefix_gets_the_state_of_another_one],
        "offload": [
            damaged_files_count,
            a_load_is_reported_before_it_ends,
            a_block_is_saved_before_it_is_complete,
        ],
        "peers": [
            blocks_that_did_not_arrive_count,
            a_block_is_taken_for_another_one,
        ],
        "states_elsewhere": [a_state_that_did_not_arrive_counts],
        "connectors": [
            blocks_that_a_step_did_not_load_count,
            kept_blocks_are_given_to_others,
        ],
        "api_servers": [
            an_api_server_that_ends_is_not_replaced,
            ranks_keep_the_requests_of_an_api_server_that_ended,
            requests_of_other_api_servers_are_not_aborted,
            an_api_server_is_not_told_of_ranks_that_come_back,
            counts_of_api_servers_are_lost,
        ],
        "sharing_servers": [
            a_server_that_is_gone_is_not_noticed,
            ranks_of_other_servers_are_not_told_of_a_wave,
        ],
        "starts": [what_a_worker_refuses_is_the_callers_mistake],
    }.items()
    for each in faults
}
"""By name: the capability of the deployments whose seeds look for it, and what puts it in."""
_KNOWN = {
    "what_a_worker_refuses_is_the_callers_mistake": [24],
    "a_wave_ends_though_a_rank_is_busy": [3],
    "damaged_files_count": [3],
    "a_block_is_saved_before_it_is_complete": [18],
    "a_server_that_is_gone_is_not_noticed": [7],
    "an_api_server_that_ends_is_not_replaced": [3],
    "ranks_keep_the_requests_of_an_api_server_that_ended": [8],
    "requests_of_other_api_servers_are_not_aborted": [454],
    "an_api_server_is_not_told_of_ranks_that_come_back": [112],
}
"""Seeds that have found what few find. They look first."""


def _played(name: str, seed: int) -> list[str]:
    from simulation.cluster.making import scenario_of
    from simulation.cluster.play import play

    capability, put_in = FAULTS[name]
    put_in()
    return play(scenario_of(seed, capability=capability)).problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation.cluster.deployments.injected", description=__doc__)
    parser.add_argument("--seeds", type=int, default=30, help="how many look for a fault")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="by default all")
    given = parser.parse_args()
    if "PYTHONHASHSEED" not in os.environ:
        # sets of strings go by their hashes
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})
    install()
    num_missed = 0
    for name in given.faults:
        seeds = [*_KNOWN.get(name, ()), *range(given.seeds)]
        works = ((seed, partial(_played, name, seed)) for seed in seeds)
        found = None
        for seed, problems in run_all_apart(works, 1, _LIMIT_S):
            found = problems.reason if isinstance(problems, Died) else problems[0] if problems else None
            if found is not None:
                print(f"{name}: seed {seed}: {found.strip().splitlines()[-1][:300]}", flush=True)
                break
        num_missed += found is None
        if found is None:
            print(f"{name}: not found", flush=True)
    return bool(num_missed)


if __name__ == "__main__":
    sys.exit(main())
