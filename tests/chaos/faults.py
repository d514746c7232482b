"""Faults: processes are killed (SIGKILL), stopped (SIGSTOP) or made to raise, and nodes are removed."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from common import fail_next_step

from chaos.clusters import Cluster
from chaos.interruptions import PHASES, Interrupter, Phase
from chaos.workload import Stream
from raycore import AsyncLLM
from raycore.engine.rank_events import RankEvent, RanksLost, RankUp

REMOVE_NODE = "remove node"


def process_kinds(num_stages: int) -> list[str]:
    """The kinds of faults of a rank's processes. A worker of each stage is a kind of its own."""
    workers = ["worker"] if num_stages == 1 else [f"worker of stage {stage}" for stage in range(num_stages)]
    return [f"{act} {process}" for act in ("kill", "stop") for process in ("engine", *workers)] + ["raise in a step"]


def is_told_at_once(kind: str) -> bool:
    """Whether Ray says at once that a process has ended."""
    return kind.startswith("kill")


@dataclass
class Fault:
    kind: str
    dp_rank: int
    phase: Phase
    """What the engine did."""
    injected_s: float
    detected_s: float | None = None
    serving_s: float | None = None
    num_outputs: dict[str, int] = field(default_factory=dict)
    """How many outputs each stream on the rank had before the fault, by request id."""

    def stalls_s(self, streams: dict[str, Stream]) -> Iterator[float]:
        """How long each stream on the rank stalled."""
        for request_id, count in self.num_outputs.items():
            times_s = streams[request_id].times_s
            if count < len(times_s):
                yield times_s[count] - times_s[count - 1]


class Observer:
    """Records when ranks are found lost and serve again, and when streams get output."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.faults: list[Fault] = []
        self.streams: dict[str, Stream] = {}
        llm.trace_requests()  # so that each output says which rank it comes from
        self._clients = llm.clients
        note = self._clients.on_rank_event

        def on_rank_event(event: RankEvent) -> None:
            if isinstance(event, RanksLost):
                now_s = time.monotonic()
                for fault in itertools.chain(*map(self._open, event.dp_ranks)):
                    fault.detected_s = fault.detected_s or now_s
            note(event)
            if isinstance(event, RankUp):
                for fault in self._open(event.dp_rank):
                    fault.serving_s = time.monotonic()

        self._clients.on_rank_event = on_rank_event

    def _open(self, dp_rank: int) -> list[Fault]:
        return [fault for fault in self.faults if fault.dp_rank == dp_rank and fault.serving_s is None]

    def is_whole(self) -> bool:
        """Whether every broken rank serves again."""
        return all(fault.serving_s is not None for fault in self.faults)

    def serving(self) -> list[int]:
        """Ranks that are serving."""
        broken = {fault.dp_rank for fault in self.faults if fault.serving_s is None}
        return [rank for rank in self._clients.links() if rank not in broken]

    def num_outputs_on(self, dp_rank: int) -> dict[str, int]:
        """How many outputs each stream on this rank has, by request id. Includes streams that have finished."""
        # a copy: the event loop's thread adds streams
        streams = list(self.streams.items())
        return {request_id: len(stream.times_s) for request_id, stream in streams if stream.dp_rank == dp_rank}


class Injector:
    """Injects faults, of each kind in turn. Each breaks a rank while another one is serving."""

    def __init__(
        self, llm: AsyncLLM, cluster: Cluster, observer: Observer, interrupter: Interrupter, kinds: list[str], seed: int
    ) -> None:
        self._llm = llm
        self._cluster = cluster
        self._observer = observer
        self._interrupter = interrupter
        self._kinds = kinds
        self._rnd = random.Random(seed)
        self._next_kinds: list[str] = []

    async def run(self, interval_s: float) -> None:
        """Inject faults until cancelled, one in `interval_s` on average. If the engine is interrupted again and again,
        the faults are injected then.
        """
        while True:
            await asyncio.sleep(self._rnd.expovariate(1 / interval_s))
            if self._interrupter.is_active:
                await self._interrupter.wait_for(self._rnd.choice(PHASES[1:]))
            serving = self._observer.serving()
            if len(serving) < 2:
                continue  # never the last one: stalls measure how fast another rank takes over, not how fast one starts
            await asyncio.to_thread(self._break, self._next_kind(), self._rnd.choice(serving))

    def _next_kind(self) -> str:
        if not self._next_kinds:
            kinds = [kind for kind in self._kinds if kind != REMOVE_NODE or self._cluster.can_remove]
            self._next_kinds = self._rnd.sample(kinds, len(kinds))
        return self._next_kinds.pop()

    def _break(self, kind: str, dp_rank: int) -> None:
        info = next(info for info in self._llm.engine_infos if info.dp_rank == dp_rank)
        num_outputs = self._observer.num_outputs_on(dp_rank)
        fault = Fault(kind, dp_rank, self._interrupter.phase, time.monotonic(), num_outputs=num_outputs)
        self._observer.faults.append(fault)
        act, _, process = kind.partition(" ")
        if kind == REMOVE_NODE:
            self._cluster.remove(info.node_id)
        elif act == "raise":
            fail_next_step(self._llm, dp_rank)
        else:
            pid = info.pid if process == "engine" else self._worker_pid(info.worker_pids, process)
            os.kill(pid, signal.SIGKILL if act == "kill" else signal.SIGSTOP)

    def _worker_pid(self, pids: list[int], process: str) -> int:
        """One of the workers, which are in the order of their stages."""
        stage = int(process.partition(" of stage ")[2] or 0)
        size = self._llm.config.parallel.tensor_parallel_size
        return self._rnd.choice(pids[stage * size : (stage + 1) * size])
