"""A run: requests on an engine that nothing disturbs, and the same requests while it is disturbed."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from chaos.adapter_churn import AdapterChurn, add_and_compare
from chaos.clusters import Cluster, leftovers, process_ids
from chaos.comparison import Comparison
from chaos.connectors import transfers_of
from chaos.faults import Injector, Observer
from chaos.interruptions import Interrupter, Interruption
from chaos.workload import Request, Result, run_all
from raycore import AsyncLLM, LoRARequest
from raycore.demo import demo_model_path

STEP_TIMEOUT_S = 2.0
RECOVERY_S = 120.0
"""Seconds within which all ranks have to serve again at the end."""


@dataclass
class Pace:
    """How the engine is disturbed."""

    fault_interval_s: float
    interruptions: Sequence[Interruption]
    interruption_interval_s: float
    still_s: float
    timeout_s: float
    """Of the whole disturbed run."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every disturbed run."""
    parser.add_argument("--model", default=str(demo_model_path()))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--fault-interval-s", type=float, default=3.0, help="mean time between faults")
    parser.add_argument("--interruption-interval-s", type=float, default=1.5, help="mean time between interruptions")
    parser.add_argument("--still-s", type=float, default=0.7, help="mean time of a pause or sleep")
    parser.add_argument("--timeout-s", type=float, default=900.0)


def pace_of(args: argparse.Namespace, interruptions: Sequence[Interruption]) -> Pace:
    """The pace that the options of `add_options` say."""
    return Pace(args.fault_interval_s, interruptions, args.interruption_interval_s, args.still_s, args.timeout_s)


def start_engine(args: argparse.Namespace, dp: int, **options: Any) -> AsyncLLM:
    """Start an engine that replaces broken ranks quickly, and as often as needed."""
    return AsyncLLM(
        args.model,
        dtype=args.dtype,
        data_parallel_size=dp,
        executor_backend="ray",
        num_threads=1,
        max_model_len=512,
        max_num_seqs=64,
        step_timeout_s=STEP_TIMEOUT_S,
        restart_backoff_s=0.05,
        standby_delay_s=0.0,
        max_request_replays=1000,
        max_rank_restarts=1000,
        use_tqdm_on_load=False,
        **options,
    )


class DisturbedRun:
    """Requests on an engine that is disturbed. The attributes are what was seen."""

    def __init__(
        self,
        llm: AsyncLLM,
        cluster: Cluster,
        fault_kinds: list[str],
        pace: Pace,
        requests: list[Request],
        concurrency: int,
        seed: int,
        adapters: Sequence[LoRARequest] = (),
    ) -> None:
        """Runs all requests once, undisturbed.

        `adapters`: those that requests use, and one that is added and removed while the engine is disturbed.
        """
        self._llm = llm
        self._cluster = cluster
        self._pace = pace
        self._requests = requests
        self._concurrency = concurrency
        asyncio.run(add_and_compare(llm, adapters[:-1]))
        self.churn = AdapterChurn(llm, adapters[-1] if adapters else None)
        self._expected = asyncio.run(run_all(llm, requests, concurrency, {}))
        self._pids = process_ids(llm)
        self.observer = Observer(llm)
        self.interrupter = Interrupter(llm, pace.interruptions, seed)
        self._injector = Injector(llm, cluster, self.observer, self.interrupter, fault_kinds, seed)
        self.comparison = Comparison(llm.config.model.batch_invariant)
        self.elapsed_s = 0.0
        self.transfers = Counter[str]()
        """Of blocks between ranks, or of embeddings."""
        self.left: list[str] = []
        """What the engine has left behind."""

    def run(self, is_enough: Callable[[DisturbedRun], bool]) -> None:
        """Repeat the requests on the disturbed engine until it `is_enough`. Then let it recover, and shut it down."""
        started_s = time.monotonic()
        self._run_in_time(self._disturbed(is_enough))
        self.elapsed_s = time.monotonic() - started_s
        self._run_in_time(self._recover())
        if self._llm.config.kv_transfer_config is not None or self._llm.config.ec_transfer_config is not None:
            self.transfers = asyncio.run(transfers_of(self._llm))
        self._pids |= process_ids(self._llm)
        self._llm.shutdown()
        self.left = leftovers(self._pids) + self._cluster.close()

    def num_outputs_while_still(self) -> int:
        """How many outputs of streams came while the engine was paused or asleep."""
        times_s = (time_s for stream in self.observer.streams.values() for time_s in stream.times_s)
        return len(self.interrupter.still_times(times_s))

    def is_good(self) -> bool:
        """Whether nothing was lost, differs, came in a pause or is left, and all ranks serve again."""
        is_whole = self.observer.is_whole() and not self.left
        return self.comparison.is_good() and is_whole and not self.num_outputs_while_still()

    def _run_in_time(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(asyncio.wait_for(work, self._pace.timeout_s))

    async def _disturbed(self, is_enough: Callable[[DisturbedRun], bool]) -> None:
        pace, is_over = self._pace, asyncio.Event()

        async def run_requests() -> None:
            while not is_enough(self):
                await self._run_first(len(self._requests))
            is_over.set()

        injector = asyncio.ensure_future(self._injector.run(pace.fault_interval_s))
        try:
            await asyncio.gather(
                run_requests(),
                self.interrupter.run(pace.interruption_interval_s, pace.still_s, is_over),
                self.churn.run(is_over),
            )
        finally:
            injector.cancel()
            with suppress(asyncio.CancelledError):
                await injector

    async def _recover(self) -> None:
        deadline_s = time.monotonic() + RECOVERY_S
        while not self.observer.is_whole() and time.monotonic() < deadline_s:
            await self._run_first(self._concurrency)  # a stopped process is detected only while its rank has requests

    async def _run_first(self, count: int) -> None:
        first_id = self.comparison.num_results
        requests = self._requests[:count]
        results = await run_all(self._llm, requests, self._concurrency, self.observer.streams, first_id)
        for result, reference, request in zip(results, self._expected, requests, strict=False):
            assert isinstance(reference, Result), reference
            self.comparison.add(result, reference, request.params)
