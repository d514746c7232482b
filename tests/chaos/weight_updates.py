"""Updates the weights of an engine again and again while requests run and processes fail, and checks every token.

The versions of the weights are those of a few checkpoints whose answers name them. A trainer brings all tensors of one
of them, or has its files read. Some updates are given up half-way, some are refused by one rank, and in the middle of
some, a process is killed. Besides, engines and workers are killed (SIGKILL) or stopped (SIGSTOP) again and again, also
the last rank. The trainer tries again until all updates are applied. At the end, each part of each output is computed
again, by an engine that has started with the weights that the output names for this part.

    python -m tests.chaos.weight_updates                        100 updates at DP 2 by Ray's store
    python -m tests.chaos.weight_updates --ways ray,ipc,nccl,disk --updates 25        by each way
    python -m tests.chaos.weight_updates --expert-parallel      of a model whose ranks share experts

The exit status is 1 if an update wasn't applied, a request was lost, a token isn't that of the weights that its output
names, a version wasn't current, or anything is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from common import table

from chaos.clusters import Cluster, leftovers, process_ids
from chaos.named_weights import Answer, count_wrong_parts, number_of, problems, write_experts, write_variants
from chaos.report import counted
from chaos.run import RECOVERY_S, add_options, start_engine
from chaos.trainer import WAYS, Trainer
from raycore import AsyncLLM, RaycoreError, SamplingParams, WeightVersionChanged
from raycore.messages import EngineInfo

PROMPTS = ("27 + 58 =", "The capital of France is", "def add(a, b):", "once upon a time", "1, 2, 3,")
UPDATE_TIMEOUT_S = 60.0


class Chaos:
    """Requests, updates and faults on one engine. The attributes are what was seen."""

    def __init__(self, llm: AsyncLLM, trainer: Trainer, args: argparse.Namespace) -> None:
        self._llm = llm
        self._args = args
        self._rnd = random.Random(args.seed)
        self._is_over = asyncio.Event()
        self.trainer = trainer
        self.answers: list[Answer] = []
        self.faults: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        trainer.on_half_way = lambda: self._break([signal.SIGKILL], ", half-way")
        llm.on_stale_rank = lambda dp_rank, reason: self.counts.update(["stale"])

    async def run(self) -> None:
        """Run until all updates are applied, and all requests have ended."""
        load = [asyncio.create_task(self._requests(number)) for number in range(self._args.concurrency)]
        faults = asyncio.create_task(self._break_again_and_again())
        last_s = time.monotonic() + self._args.updates_s
        try:
            while self.trainer.applied.total() < self._args.updates and time.monotonic() < last_s:
                await self.trainer.update(last_s + RECOVERY_S - time.monotonic())
                await asyncio.sleep(self._rnd.expovariate(1 / self._args.update_interval_s))
        except RaycoreError as error:
            self.errors.append(f"an update wasn't applied: {error}")
        faults.cancel()
        await self._recover()
        self._is_over.set()
        await asyncio.wait_for(asyncio.gather(*load), RECOVERY_S)
        self.trainer.leave()

    async def _recover(self) -> None:
        """Wait until all ranks serve. Ranks whose weights are gone need an update."""
        deadline_s = time.monotonic() + RECOVERY_S
        while any(rank.state != "serving" for rank in self._llm.ranks):
            if time.monotonic() > deadline_s:
                self.errors.append(f"ranks don't serve again: {[rank.state for rank in self._llm.ranks]}")
                return
            if any(rank.state == "stale" for rank in self._llm.ranks):
                self.counts["updates for stale ranks, at the end"] += 1
                await self.trainer.update(RECOVERY_S)
            await asyncio.sleep(0.5)

    async def _requests(self, number: int) -> None:
        rnd = random.Random(number)
        while not self._is_over.is_set():
            params = SamplingParams(
                temperature=0,
                max_tokens=rnd.randrange(20, 120),
                ignore_eos=True,
                on_version_change="fail" if number % 4 == 0 else "continue",
            )
            current = number_of(self.trainer.current)
            self.counts["requests"] += 1
            try:
                async for output in self._llm.generate(rnd.choice(PROMPTS), params, stream=False):
                    self.answers.append(Answer(output, current, params.max_tokens or 0))
            except WeightVersionChanged:
                self.counts["asked to fail"] += 1
            except RaycoreError as error:
                self.counts["lost"] += 1
                self.errors.append(f"lost: {str(error).splitlines()[0][:200]}")

    async def _break_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(self._rnd.uniform(0.5, 1.5) * self._args.fault_interval_s)
            self._break([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])

    def _break(self, signals: list[signal.Signals], when: str = "") -> None:
        infos: list[EngineInfo] = self._llm.engine_infos
        if not infos:
            return
        info = self._rnd.choice(infos)
        pid, number = self._rnd.choice([info.pid, *info.worker_pids]), self._rnd.choice(signals)
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            what = "kill" if number == signal.SIGKILL else "stop"
            self.faults[f"{what} {'engine' if pid == info.pid else 'worker'}{when}"] += 1


def measure(way: str, variants: list[Path], args: argparse.Namespace) -> bool:
    """Run with one way, and print what was seen. Returns whether all is well."""
    cluster = Cluster(args.dp, 1)
    options = {
        "batch_invariant": True,
        "enable_expert_parallel": args.expert_parallel,
        "weight_transfer_config": {"backend": way, "timeout_s": Trainer.group_timeout_s},
        "weight_update_timeout_s": UPDATE_TIMEOUT_S,
    }
    llm = start_engine(argparse.Namespace(**vars(args) | {"model": str(variants[0])}), args.dp, **options)
    trainer = Trainer(llm, way, variants, UPDATE_TIMEOUT_S * 2, random.Random(args.seed))
    pids, chaos, started_s = process_ids(llm), Chaos(llm, trainer, args), time.monotonic()
    try:
        asyncio.run(asyncio.wait_for(chaos.run(), args.timeout_s))
    finally:
        elapsed_s = time.monotonic() - started_s
        pids |= process_ids(llm)
        llm.shutdown()
    left = leftovers(pids)
    found = [problem for answer in chaos.answers for problem in problems(answer)]
    num_wrong, num_parts = count_wrong_parts(chaos.answers, variants, args)
    left += cluster.close()
    num_applied = trainer.applied.total()
    changed = [answer for answer in chaos.answers if len(answer.spans) > 1]
    name = f"DP {args.dp}, {'experts shared, ' if args.expert_parallel else ''}{way}"
    rows = [
        ["", name],
        ["seconds", f"{elapsed_s:.0f}"],
        ["updates applied", f"{num_applied}: {counted(trainer.applied.elements())}"],
        ["attempts that failed, and were repeated", f"{trainer.failed.total()}: {counted(trainer.failed.elements())}"],
        ["attempts given up half-way on purpose", trainer.given_up],
        ["faults", f"{chaos.faults.total()}: {counted(chaos.faults.elements())}"],
        ["stale ranks, until the next update", chaos.counts["stale"]],
        ["requests", chaos.counts["requests"]],
        ["requests that failed because they asked to", chaos.counts["asked to fail"]],
        ["outputs of several versions", len(changed)],
        ["requests lost", chaos.counts["lost"]],
        ["outputs that contradict their versions", len(found)],
        ["parts of outputs with wrong tokens", f"{num_wrong} of {num_parts}"],
        ["left behind", ", ".join(left) or "nothing"],
    ]
    print(table(rows), flush=True)
    print("\n".join([*chaos.errors, *found][:20]), flush=True)
    if args.verbose:
        print("\n".join(trainer.errors), flush=True)
    return not (num_applied < args.updates or chaos.counts["lost"] or chaos.errors or found or num_wrong or left)


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.set_defaults(fault_interval_s=1.0)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--ways", default="ray", help=f"how tensors come, one after the other: {','.join(WAYS)}")
    parser.add_argument("--expert-parallel", action="store_true", help="with a model whose ranks share experts")
    parser.add_argument("--updates", type=int, default=100, help="that have to be applied, by each way")
    parser.add_argument("--updates-s", type=float, default=600.0, help="seconds after which no more updates begin")
    parser.add_argument("--update-interval-s", type=float, default=0.7, help="mean time between updates")
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--verbose", action="store_true", help="print why attempts failed")
    args = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    os.environ.setdefault("RAY_worker_niceness", "0")
    with tempfile.TemporaryDirectory(prefix="weight-updates-") as directory:
        model = str(write_experts(Path(directory))) if args.expert_parallel else args.model
        variants = write_variants(model, Path(directory))
        results = [measure(way, variants, args) for way in args.ways.split(",")]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
