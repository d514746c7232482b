"""Updates the weights of an engine again and again while requests run and processes fail, and checks every token.

The versions of the weights are those of a few checkpoints, made from the bundled model. Updates bring all tensors of
one of them, or read its files, or are given up half-way. Meanwhile, engines and workers are killed (SIGKILL) or stopped
(SIGSTOP), also in the middle of updates, and also the last rank. At the end, each part of each output is computed
again, by an engine that has started with the weights that the output names for this part.

    python benchmarks/weight_updates_chaos.py                  100 updates at DP 2, a fault each second
    python benchmarks/weight_updates_chaos.py --updates 20     fewer

The exit status is 1 if a request was lost, a token isn't that of the weights that its output names, or anything is left
behind. An update may fail if no rank is left that has followed it: the old weights serve then, or none.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from common import table
from disturbance.clusters import Cluster, leftovers, process_ids
from disturbance.run import add_options, start_engine
from safetensors.torch import load_file, save_file

from raycore import AsyncLLM, RaycoreError, RequestOutput, SamplingParams, WeightVersionChanged

PROMPTS = ("27 + 58 =", "The capital of France is", "def add(a, b):", "once upon a time", "1, 2, 3,")
NUM_VARIANTS = 4
KINDS = ("tensors", "from files", "given up")
RECOVERY_S = 120.0


def make_variants(model: str, directory: Path) -> list[Path]:
    """Write checkpoints of the same model with other weights."""
    paths: list[Path] = []
    for index in range(NUM_VARIANTS):
        path = directory / f"variant{index}"
        shutil.copytree(model, path)
        generator = torch.Generator().manual_seed(index)
        for file in path.glob("*.safetensors"):
            tensors = {
                name: (each.float() * (1 + 0.05 * index * torch.randn(each.shape, generator=generator))).to(each.dtype)
                for name, each in load_file(file).items()
            }
            save_file(tensors, file, {"format": "pt"})
        paths.append(path)
    return paths


def variant_of(version: str) -> int:
    """The checkpoint that a version's weights are those of: names are `number-variant`."""
    return 0 if version == "default" else int(version.rpartition("-")[2])


@dataclass
class Seen:
    """What was seen."""

    outputs: list[RequestOutput] = field(default_factory=list[RequestOutput])
    counts: Counter[str] = field(default_factory=Counter[str])
    errors: list[str] = field(default_factory=list[str])


class Chaos:
    """Requests, updates and faults on one engine."""

    def __init__(self, llm: AsyncLLM, variants: list[Path], args: argparse.Namespace) -> None:
        self._llm = llm
        self._variants = variants
        self._args = args
        self._rnd = random.Random(args.seed)
        self.seen = Seen()
        self._is_over = asyncio.Event()
        llm.on_stale_rank = lambda dp_rank, reason: self.seen.counts.update(["stale ranks"])

    async def run(self) -> None:
        """Run until all updates are made, and all requests have ended."""
        load = [asyncio.create_task(self._requests(number)) for number in range(self._args.concurrency)]
        faults = asyncio.create_task(self._faults())
        last_s = time.monotonic() + self._args.updates_s
        for number in range(1, self._args.updates + 1):
            if time.monotonic() > last_s:
                break
            await self._change(number)
            await asyncio.sleep(self._rnd.expovariate(1 / self._args.update_interval_s))
        faults.cancel()
        await self._recover()
        self._is_over.set()
        await asyncio.wait_for(asyncio.gather(*load), RECOVERY_S)

    async def _change(self, number: int) -> None:
        variant = self._rnd.randrange(NUM_VARIANTS)
        path, version = str(self._variants[variant]), f"{number}-{variant}"
        kind = self._rnd.choices(KINDS, [6, 3, 1])[0]
        self.seen.counts[kind] += 1
        try:
            if kind == "from files":
                await self._llm.reload_weights(path, version)
                return
            await self._llm.start_weight_update()
            await self._llm.update_weights({"update_info": {"path": path}})
            if kind == "tensors":
                await self._llm.finish_weight_update(version)
            else:
                await self._llm.cancel_weight_update()
        except RaycoreError as error:
            self.seen.counts["updates that failed"] += 1
            self.seen.errors.append(f"update {number}: {str(error).splitlines()[0][:200]}")
            await self._llm.cancel_weight_update()

    async def _recover(self) -> None:
        """Wait until all ranks serve. Ranks whose weights are gone need an update."""
        deadline_s = time.monotonic() + RECOVERY_S
        while any(rank.state != "serving" for rank in self._llm.ranks) and time.monotonic() < deadline_s:
            if any(rank.state == "stale" for rank in self._llm.ranks):
                with suppress(RaycoreError):
                    await self._llm.reload_weights(str(self._variants[1]), "last-1")
            await asyncio.sleep(0.5)
        states = [rank.state for rank in self._llm.ranks]
        if any(state != "serving" for state in states):
            self.seen.errors.append(f"ranks don't serve again: {states}")
            self.seen.counts["ranks that stay broken"] += 1

    async def _requests(self, number: int) -> None:
        rnd = random.Random(number)
        while not self._is_over.is_set():
            mode = "fail" if number % 4 == 0 else "continue"
            params = SamplingParams(
                temperature=0, max_tokens=rnd.randrange(20, 120), ignore_eos=True, on_version_change=mode
            )
            self.seen.counts["requests"] += 1
            try:
                async for output in self._llm.generate(rnd.choice(PROMPTS), params, stream=False):
                    self.seen.outputs.append(output)
            except WeightVersionChanged:
                self.seen.counts["requests that asked to fail"] += 1
            except RaycoreError as error:
                self.seen.counts["lost"] += 1
                self.seen.errors.append(f"lost: {str(error).splitlines()[0][:200]}")

    async def _faults(self) -> None:
        while True:
            await asyncio.sleep(self._rnd.uniform(0.5, 1.5) * self._args.fault_interval_s)
            infos = self._llm.engine_infos
            if not infos:
                continue
            info = self._rnd.choice(infos)
            pid = self._rnd.choice([info.pid, *info.worker_pids])
            number = self._rnd.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                self.seen.counts["faults"] += 1


def wrong_parts(outputs: list[RequestOutput], variants: list[Path], args: argparse.Namespace) -> tuple[int, int]:
    """Compute each part of each output again. Returns the numbers of parts that differ, and of all parts."""
    parts: defaultdict[int, dict[tuple[int, ...], set[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(set))
    num_wrong = num_parts = 0
    for output in outputs:
        (completion,) = output.outputs
        position = 0
        for span in completion.weight_versions or []:
            num_wrong += span.start != position
            position = span.end
            known = (*output.prompt_token_ids, *completion.token_ids[: span.start])
            parts[variant_of(span.version)][known].add(tuple(completion.token_ids[span.start : span.end]))
        num_wrong += position != len(completion.token_ids)
    for variant, by_prompt in parts.items():
        num_wrong += asyncio.run(_compare(variants[variant], by_prompt, args))
        num_parts += sum(map(len, by_prompt.values()))
    return num_wrong, num_parts


async def _compare(path: Path, expected: dict[tuple[int, ...], set[tuple[int, ...]]], args: argparse.Namespace) -> int:
    llm = start_engine(argparse.Namespace(**vars(args) | {"model": str(path)}), 1, batch_invariant=True)

    async def tokens(prompt: tuple[int, ...], length: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        async for output in llm.generate({"prompt_token_ids": list(prompt)}, params, stream=False):
            return output.outputs[0].token_ids
        raise AssertionError("no output")

    try:
        lengths = {prompt: max(map(len, found)) for prompt, found in expected.items()}
        results = await asyncio.gather(*(tokens(prompt, length) for prompt, length in lengths.items()))
        return sum(
            tuple(result[: len(found)]) != found
            for result, each in zip(results, expected.values(), strict=True)
            for found in each
        )
    finally:
        llm.shutdown()


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.set_defaults(fault_interval_s=1.0)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--updates-s", type=float, default=600.0, help="seconds after which no more updates begin")
    parser.add_argument("--update-interval-s", type=float, default=0.7, help="mean time between updates")
    parser.add_argument("--concurrency", type=int, default=12)
    args = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    os.environ.setdefault("RAY_worker_niceness", "0")
    with tempfile.TemporaryDirectory(prefix="weight-updates-") as directory:
        variants = make_variants(args.model, Path(directory))
        cluster = Cluster(args.dp, 1)
        options = {"batch_invariant": True, "weight_transfer_config": {"backend": "disk"}}
        llm = start_engine(argparse.Namespace(**vars(args) | {"model": str(variants[0])}), args.dp, **options)
        pids, chaos, started_s = process_ids(llm), Chaos(llm, variants, args), time.monotonic()
        asyncio.run(asyncio.wait_for(chaos.run(), args.timeout_s))
        elapsed_s = time.monotonic() - started_s
        pids |= process_ids(llm)
        llm.shutdown()
        left = leftovers(pids)
        seen, counts = chaos.seen, chaos.seen.counts
        num_wrong, num_parts = wrong_parts(seen.outputs, variants, args)
        left += cluster.close()
    changed = [output for output in seen.outputs if len(output.outputs[0].weight_versions or []) > 1]
    rows = [
        ["", f"DP {args.dp}"],
        ["seconds", f"{elapsed_s:.0f}"],
        *(["updates: " + kind, counts[kind]] for kind in KINDS),
        ["updates that found no rank, or lost all", counts["updates that failed"]],
        ["faults", counts["faults"]],
        ["stale ranks, for a while", counts["stale ranks"]],
        ["requests", counts["requests"]],
        ["requests that failed because they asked to", counts["requests that asked to fail"]],
        ["outputs of several versions", len(changed)],
        ["requests lost", counts["lost"]],
        ["parts of outputs with wrong tokens", f"{num_wrong} of {num_parts}"],
        ["left behind", ", ".join(left) or "nothing"],
    ]
    print(table(rows), flush=True)
    print("\n".join(seen.errors[:20]))
    sys.exit(bool(counts["lost"] or num_wrong or left or counts["ranks that stay broken"]))


if __name__ == "__main__":
    main()
