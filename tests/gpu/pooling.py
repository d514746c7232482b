"""Checks of models that pool, on a device: results and hidden states are transformers', and no step waits.

`measure_pooling` measures how many texts a second encoders and a decoder embed.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from embeddings import make_checkpoint
from encoder_checkpoints import FAMILIES, make_encoder, reference
from gpu_rooflines import MODELS, TOY_SIZES
from numpy.typing import NDArray
from pooling_checkpoints import CASES, checkpoint, prompts, references

from gpu.checks import Checks, Report
from gpu.engines import Device, engine, int32
from raycore.engine.core import EngineCore
from raycore.messages import EngineRequest, NewRequest, StepPlan
from raycore.parts.pooling.client.pooling import PLACEHOLDER, resolved
from raycore.pooling_params import PoolingParams

ERROR = 1e-4
"""The largest difference of two numbers of a result in float32."""
STATE_ERROR = 3e-4
"""The same of hidden states, which are larger."""
LEAST_COSINE = 0.998
"""Of hidden states in bfloat16 and in float32."""
ENCODER_LENGTHS = (5, 40, 37, 1, 90, 40)
NUM_TIMED = 256
NUM_TOKENS = 128
"""Of a timed text."""


def check_pooling(checks: Checks) -> None:
    """Compare every form of pooling decoders and every family of encoders with transformers."""
    for name in CASES:
        made = functools.cache(functools.partial(_case, checks.directory, name))
        for how, options in (("in chunks", {"max_num_batched_tokens": 24}), ("whole", {})):
            checks.run(f"pooling, {name}, {how}", functools.partial(_check_case, checks, name, made, options))
    for family in FAMILIES:
        path = functools.cache(functools.partial(make_encoder, checks.directory / family, f"{family}Model"))
        for dtype in ("float32", "bfloat16"):
            checks.run(f"{family}, {dtype}, hidden states", functools.partial(_check_encoder, checks, path, dtype))
    if checks.needs_gpu("no synchronization in steps that pool"):
        return
    for name in ("last", "mean_of_a_model_that_generates", "rewards_of_steps", "ModernBert"):
        checks.run(f"no synchronization, {name}", functools.partial(_check_waiting, checks, name))


def _case(directory: Path, name: str) -> tuple[Path, list[dict[str, NDArray[np.float32]]]]:
    path = checkpoint(name, directory)
    return path, references(name, path, prompts())


def _check_case(checks: Checks, name: str, made: Any, options: dict[str, Any]) -> tuple[bool, str]:
    path, expected = made()
    worst, num_results = 0.0, 0
    with engine(path, checks.device, **options | CASES[name].options) as core:
        for task in expected[-1]:
            # twice: prompts are then in the prefix cache, where that may be used
            for _ in range(2):
                for found, wanted in zip(pool(core, task, prompts()), expected, strict=True):
                    assert found.shape == wanted[task].shape
                    worst = max(worst, float(np.abs(found - wanted[task]).max(initial=0.0)))
                    num_results += 1
    return worst <= ERROR, f"{num_results} results, off by at most {worst:.1e}"


def _check_encoder(checks: Checks, make: Any, dtype: str) -> tuple[bool, str]:
    path = make()
    network = reference(path).base_model
    rng = np.random.default_rng(3)
    asked = [rng.integers(3, 100, length).tolist() for length in ENCODER_LENGTHS]
    with torch.inference_mode():
        expected = [network(torch.tensor([prompt])).last_hidden_state[0] for prompt in asked]
    with engine(path, checks.device, dtype=dtype, runner="pooling") as core:
        params = PoolingParams(task="token_embed", use_activation=False)
        found = [torch.tensor(each) for each in pool(core, "token_embed", asked, params)]
    pairs = list(zip(found, expected, strict=True))
    worst = max(float((one - other).abs().max()) for one, other in pairs)
    cosine = min(float(torch.cosine_similarity(one, other).min()) for one, other in pairs)
    is_ok = worst <= STATE_ERROR if dtype == "float32" else cosine >= LEAST_COSINE
    return is_ok, f"{sum(map(len, found))} states, off by at most {worst:.1e}, least cosine {cosine:.6f}"


def pool(
    core: EngineCore, task: Any, asked: Sequence[list[int]], params: PoolingParams | None = None
) -> list[NDArray[np.float32]]:
    """Return the results of prompts that are asked together."""
    spec = core.config.model.spec.pooling
    assert spec is not None
    params = resolved(params, task, spec)
    for seq_id, prompt in enumerate(asked):
        core.submit(EngineRequest(seq_id, str(seq_id), prompt, PLACEHOLDER, seed=0, pooling=params))
    found: dict[int, NDArray[np.float32]] = {}
    while core.has_work():
        outputs = core.step()
        if outputs is not None:
            assert not [each for each in outputs.finished if each.finish_reason in ("error", "failed")]
            found |= {seq_id: np.ndarray(each.shape, np.float32, each.data) for seq_id, each in outputs.pooled}
    return [found[seq_id] for seq_id in range(len(asked))]


def _check_waiting(checks: Checks, name: str) -> tuple[bool, str]:
    """Launch prompts while every call that waits for the device is an error."""
    if name in FAMILIES:
        path, options = checks.directory / name, {"runner": "pooling"}
    else:
        path, options = checks.directory / name, CASES[name].options
    with engine(path, checks.device, async_scheduling=True, **options) as core:
        spec, execute = core.config.model.spec.pooling, core.executor.execute
        assert spec is not None
        size, counts = 8 * core.cache.layout.num_groups, [40, 33, 9]

        def step(number: int) -> StepPlan:
            requests = [
                NewRequest(
                    slot,
                    int32([5] * count),
                    count,
                    0,
                    int32(range(size * slot, size * slot + size)),
                    PLACEHOLDER,
                    seed=0,
                    pooling=resolved(None, spec.tasks[slot % len(spec.tasks)], spec),
                )
                for slot, count in enumerate(counts)
            ]
            freed = list(range(3)) if number else []
            return StepPlan(number, int32(range(3)), int32(counts), freed_slots=freed, new_requests=requests)

        for number in range(2):
            execute(step(number)).result()
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = [execute(step(number)) for number in (2, 3)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        num_results = sum(len(each.result().pooled) for each in launched)
    return num_results == 6, f"{len(launched)} steps launched"


def measure_pooling(device: Device, is_toy: bool, report: Report, deadline_s: float) -> None:
    """Report texts a second of embeddings, at 1 and 64 at a time, through the scheduler and one worker."""
    report(f"\n## Embeddings of texts of {NUM_TOKENS} tokens{' (toy)' if is_toy else ''}\n")
    report("| model | at a time | texts per second | ms |\n|---|---:|---:|---:|")
    for name in ("minilm6", "bert_base", "modernbert_base", "0.6b", "8b"):
        if time.monotonic() > deadline_s:
            report(f"skipped {name}: out of time")
            continue
        with tempfile.TemporaryDirectory(prefix="raycore_gpu_") as directory:
            path = Path(directory)
            if name in MODELS:
                (path / "config.json").write_text(json.dumps(MODELS[name] | (TOY_SIZES if is_toy else {})))
            elif is_toy:
                make_encoder(path)
            else:
                make_checkpoint(path, name)
            _measure_texts(name, path, device, is_toy, report)


def _measure_texts(name: str, path: Path, device: Device, is_toy: bool, report: Report) -> None:
    num_tokens, num_texts = (16, 8) if is_toy else (NUM_TOKENS, NUM_TIMED)
    options: dict[str, Any] = {
        "load_format": "dummy" if name in MODELS else "auto",
        "runner": "pooling",
        "dtype": "bfloat16",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 64 * num_tokens,
        "max_model_len": num_tokens,
        "num_gpu_blocks_override": 64 * (num_tokens // 16 + 1),
    }
    if name in MODELS:
        options["enable_prefix_caching"] = False
    rng = np.random.default_rng(0)
    with engine(path, device, **options) as core:
        for count in (1, 64):
            times: list[float] = []
            for _ in range(2 + max(2, num_texts // count // (16 if count == 1 else 1))):
                asked = rng.integers(5, 100, (count, num_tokens)).tolist()
                started_s = time.perf_counter()
                pool(core, "embed", asked)
                times.append(time.perf_counter() - started_s)
            took_s = float(np.median(times[2:]))
            report(f"| {name} | {count} | {count / took_s:,.0f} | {took_s * 1e3:.2f} |")
