"""Checks of engines whose blocks go to the host's memory and come back, on a device."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gpu.checks import Checks
from gpu.engines import VOCAB_SIZE, Answer, engine, generate
from raycore.sampling_params import SamplingParams

NUM_TOKENS = 100
CONNECTOR: dict[str, Any] = {
    "kv_connector": "OffloadConnector",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20, "always_load": True},
}


def check_offload(checks: Checks) -> None:
    """Tokens are the same if their prompts' blocks come back from the host's memory."""
    for family in ("qwen3", "mistral"):
        for name, options in (
            ("1 in flight", {"async_scheduling": False}),
            ("2 in flight, few blocks", {"async_scheduling": True, "num_gpu_blocks_override": 40}),
            ("fp8", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
        ):
            if name == "fp8" and checks.needs_gpu(f"{family}, blocks from the host, fp8"):
                continue
            checks.run(f"{family}, blocks from the host, {name}", functools.partial(_check, checks, family, options))


def _check(checks: Checks, family: str, options: dict[str, Any]) -> tuple[bool, str]:
    rng = np.random.default_rng(5)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    asked = [(rng.integers(0, VOCAB_SIZE, NUM_TOKENS).tolist(), greedy) for _ in range(6)]
    common = {"block_size": 16, "max_num_seqs": 4} | options
    answers: list[list[Answer]] = []
    with engine(checks.checkpoint(family), checks.device, **common) as core:
        answers.append(generate(core, asked))
    with engine(checks.checkpoint(family), checks.device, kv_transfer_config=CONNECTOR, **common) as core:
        for _ in range(3):
            answers.append(generate(core, asked))
            assert core.scheduler.reset_prefix_cache()
        num_cached = core.load().prefix_cache_hits
        transfers = core.load().transfers if hasattr(core.load(), "transfers") else ""
    first = [each.token_ids for each in answers[0]]
    num_equal = sum(each.token_ids == one for again in answers[1:] for each, one in zip(again, first, strict=True))
    return num_equal == 18, f"{num_equal} of 18 answers equal, {num_cached} cached tokens {transfers}"
