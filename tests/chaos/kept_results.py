"""Updates the weights of an engine again and again, and looks what it finds of what its ranks have kept.

Two ranks share a directory with keys and values (`files`), read each other's (`peers`), or share embeddings of images
(`images`). After each update, which comes from a trainer or from files, a prompt is asked of both ranks, one after the
other. The prompts are always the same few, so that all weights have left something behind for each. In the middle of
some updates, and after some, a rank is killed. All tokens have to be those of an engine that has started with the same
weights and keeps nothing. What the second rank is asked should be found.

    python -m tests.chaos.kept_results                          50 updates of each kind
    python -m tests.chaos.kept_results --kinds files --updates 5

The exit status is 1 if a token is wrong, or if less than half is found of what is asked twice under equal weights.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import torch
from common import table
from safetensors.torch import load_file, save_file
from vision_checkpoints import QWEN2_5, image, make_vision_checkpoint

from raycore import AsyncLLM, RaycoreError, RequestOutput, SamplingParams
from raycore.demo import demo_model_path

KINDS = ("files", "peers", "images")
NUM_VARIANTS = 3
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 512,
    "block_size": 16,
    "batch_invariant": True,
    "use_tqdm_on_load": False,
}
_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
_SETTLE_S = {"files": 0.3, "peers": 1.3, "images": 0.1}
"""For so long, what a rank has kept may be on its way to where others find it. Clients hear of peers' blocks once a
second."""
_RECOVERY_S = 120.0


def options_of(kind: str, directory: Path) -> dict[str, Any]:
    """The options of an engine that keeps results of this kind."""
    if kind == "images":
        store = {"ec_connector": "ECStoreConnector", "ec_connector_extra_config": {"path": str(directory)}}
        return {"ec_transfer_config": store, "enable_prefix_caching": False}
    extra: dict[str, Any] = {"path": str(directory), "always_load": True}
    if kind == "peers":
        extra = {"min_fetch_tokens": 16, "compare_costs": False}
    name = "OffloadConnector" if kind == "files" else "PeersConnector"
    return {"kv_transfer_config": {"kv_connector": name, "kv_connector_extra_config": extra}}


def prompts_of(kind: str, rnd: random.Random) -> list[dict[str, Any]]:
    """A few prompts, each with a long beginning of its own or with an image."""
    if kind == "images":
        text = f"What is in this image? {_PLACE} Describe it."
        return [{"prompt": text, "multi_modal_data": {"image": image(120, 90, seed)}} for seed in range(4)]
    return [{"prompt_token_ids": [rnd.randrange(10, 90) for _ in range(200)]} for _ in range(4)]


def write_variants(kind: str, directory: Path) -> list[Path]:
    """Write checkpoints of the same model with different weights."""
    plain = make_vision_checkpoint(QWEN2_5, directory) if kind == "images" else Path(demo_model_path())
    paths: list[Path] = []
    for seed in range(NUM_VARIANTS):
        path = directory / f"variant{seed}"
        path.mkdir()
        generator = torch.Generator().manual_seed(seed)
        for file in plain.iterdir():
            if file.suffix == ".safetensors":
                changed = {
                    name: (each.float() * (1 + 0.1 * torch.randn(each.shape, generator=generator))).to(each.dtype)
                    for name, each in load_file(file).items()
                }
                save_file(changed, path / file.name, {"format": "pt"})
            elif file.is_file():
                (path / file.name).write_bytes(file.read_bytes())
        paths.append(path)
    return paths


async def expected_of(path: Path, prompts: Sequence[Any]) -> list[list[int]]:
    """The tokens of an engine that has started with these weights, and keeps nothing."""
    async with AsyncLLM(str(path), enable_prefix_caching=False, **LIMITS) as llm:
        return [(await ask(llm, prompt)).outputs[0].token_ids for prompt in prompts]


async def ask(llm: AsyncLLM, prompt: Any, rank: int | None = None) -> RequestOutput:
    """Return the whole output of a prompt."""
    return [each async for each in llm.generate(prompt, PARAMS, data_parallel_rank=rank)][-1]


class Run:
    """One engine of two ranks that is updated. `counts` is what was seen."""

    def __init__(self, llm: AsyncLLM, kind: str, variants: list[Path], rnd: random.Random) -> None:
        self._llm = llm
        self._kind = kind
        self._variants = variants
        self._rnd = rnd
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def update(self, variant: int) -> None:
        """Update the weights, again if that fails because ranks are killed."""
        deadline_s = time.monotonic() + _RECOVERY_S
        while True:
            try:
                await self._attempt(variant)
            except RaycoreError:
                if time.monotonic() > deadline_s:
                    raise
                self.counts["failed attempts"] += 1
                await self._llm.cancel_weight_update()
            else:
                break
        while any(rank.state != "serving" for rank in self._llm.ranks):
            assert time.monotonic() < deadline_s, [rank.state for rank in self._llm.ranks]
            await asyncio.sleep(0.05)
        self.counts["updates"] += 1

    async def _attempt(self, variant: int) -> None:
        path = self._variants[variant]
        if self._rnd.random() < 0.5:
            await self._llm.reload_weights(str(path), "the same name")
            return
        tensors = [pair for file in sorted(path.glob("*.safetensors")) for pair in load_file(file).items()]
        await self._llm.start_weight_update()
        half = len(tensors) // 2
        await self._llm.collective_rpc("load_weights", args=(tensors[:half],))
        if self._rnd.random() < 0.2:
            self.kill()
        await self._llm.collective_rpc("load_weights", args=(tensors[half:],))
        await self._llm.finish_weight_update("the same name")

    def kill(self) -> None:
        """Kill a rank."""
        with suppress(ProcessLookupError):
            os.kill(self._rnd.choice(self._llm.engine_infos).pid, signal.SIGKILL)
            self.counts["kills"] += 1

    async def ask_twice(self, prompt: Any, expected: list[int]) -> None:
        """Ask both ranks, and note what the second one has found."""
        first, second = self._rnd.sample([0, 1], 2)
        outputs = [await ask(self._llm, prompt, first)]
        await asyncio.sleep(_SETTLE_S[self._kind])
        before = await self._num_loaded()
        outputs.append(await ask(self._llm, prompt, second))
        is_found = bool(outputs[1].num_cached_tokens) or await self._num_loaded() > before
        self.counts.update({"asked twice": 1, "found": int(is_found)})
        for output, rank in zip(outputs, (first, second), strict=True):
            tokens = output.outputs[0].token_ids
            if tokens != expected:
                self.wrong.append(f"update {self.counts['updates']}, rank {rank}: {tokens} instead of {expected}")

    async def _num_loaded(self) -> int:
        """How many embeddings of images workers have loaded."""
        if self._kind != "images":
            return 0

        def num_loaded(worker: Any) -> int:
            return worker._core.runner._source.images._store.num_loaded

        return sum(await self._llm.collective_rpc(num_loaded))


async def measure(kind: str, num_updates: int, directory: Path, seed: int = 0) -> Run:
    """Update an engine, ask it, and compare its tokens."""
    rnd = random.Random(seed)
    variants, prompts = write_variants(kind, directory), prompts_of(kind, rnd)
    expected = [await expected_of(path, prompts) for path in variants]
    options = options_of(kind, directory / "kept") | {"data_parallel_size": 2, "restart_backoff_s": 0.05}
    limits = {"max_rank_restarts": 1000, "max_request_replays": 1000}
    async with AsyncLLM(str(variants[0]), **LIMITS, **options, **limits) as llm:
        run, variant = Run(llm, kind, variants, rnd), 0
        for _ in range(num_updates):
            variant = rnd.choice([each for each in range(NUM_VARIANTS) if each != variant])
            await run.update(variant)
            for index in rnd.sample(range(len(prompts)), 2):
                await run.ask_twice(prompts[index], expected[variant][index])
            if rnd.random() < 0.2:
                run.kill()
        return run


def is_good(run: Run) -> bool:
    """Whether no token is wrong, and at least half was found."""
    return not run.wrong and 2 * run.counts["found"] >= run.counts["asked twice"] > 0


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=50, help="of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    ray.init(address="local", num_cpus=4, log_to_driver=False, include_dashboard=False)
    rows, good = [["kind", "updates", "failed attempts", "kills", "asked twice", "found", "wrong"]], True
    show: Callable[..., None] = print
    for kind in args.kinds.split(","):
        with tempfile.TemporaryDirectory(prefix="kept-results-") as directory:
            run = asyncio.run(measure(kind, args.updates, Path(directory), args.seed))
        counts = run.counts
        rows.append([kind, *(str(counts[each]) for each in rows[0][1:-1]), str(len(run.wrong))])
        good = good and is_good(run)
        show(*run.wrong[:5], sep="\n")
    print(table(rows))
    sys.exit(not good)


if __name__ == "__main__":
    main()
