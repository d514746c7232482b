"""Checks of models that see images, on a device: embeddings and greedy tokens are transformers', with CUDA graphs.

`measure_images` times encoders with the sizes of real models.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from vision_checkpoints import (
    GEMMA3,
    IMAGE,
    QWEN2_5,
    QWEN3,
    Prompt,
    Prompts,
    embeddings_of,
    greedy,
    image,
    make_vision_checkpoint,
)

from gpu.checks import Checks, Report
from gpu.engines import Device, engine
from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.engine.core import EngineCore
from raycore.layers.operations import Operations
from raycore.messages import EngineRequest
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.images.checkpoint.vision_tensors import vision_tensors
from raycore.parts.images.models import VisionSpec
from raycore.parts.images.vision.grids import Grid
from raycore.parts.images.vision.tower import Tower, make_tower
from raycore.runner.decode_graphs import CudaCapture
from raycore.sampling_params import SamplingParams
from raycore.weights.loader import load_decoder_weights
from raycore.weights.share import WeightShare

NUM_NEW_TOKENS = 12
ERROR = 5e-4
"""The largest difference of two numbers of an embedding in float32."""
GRIDS: dict[str, list[Grid]] = {
    QWEN2_5: [(1, 4, 4), (1, 8, 8), (1, 6, 10), (1, 2, 14), (2, 6, 4)],
    QWEN3: [(1, 4, 4), (1, 12, 12), (1, 6, 10), (1, 2, 14), (2, 6, 4)],
    GEMMA3: [(1, 4, 4)],
}
WAYS: dict[str, dict[str, Any]] = {
    "graphs, prefix cache": {"block_size": 4},
    "eager": {"enforce_eager": True},
    "chunks through images": {"max_num_batched_tokens": 24},
    "2 in flight, preemption": {"async_scheduling": True, "block_size": 4},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "plain torch": {"attention_backend": "torch"},
}
REAL: dict[str, dict[str, Any]] = {
    "Qwen2.5-VL-3B": {
        "kind": QWEN2_5,
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "Qwen3-VL-4B": {
        "kind": QWEN3,
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2560,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "Gemma 3 4B": {
        "kind": GEMMA3,
        "num_hidden_layers": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
    },
}
"""Sizes of the encoders of models that many use."""


def check_images(checks: Checks, kind: str) -> None:
    """Check one kind of model."""
    path = functools.cache(functools.partial(make_vision_checkpoint, kind, checks.directory))
    checks.run(f"{kind}, embeddings of images", functools.partial(_check_tower, checks, kind, path))
    case = functools.cache(lambda: _case(path()))
    for name, options in WAYS.items():
        checks.run(
            f"{kind}, tokens after images, {name}", functools.partial(_check_tokens, checks, case, name, options)
        )


def _operations(device: torch.device) -> Operations:
    if device.type == "cpu":
        return Operations(device)
    # imports Triton, which only GPUs need
    from raycore.layers.gpu_operations import GpuOperations

    return GpuOperations(device)


def _check_tower(checks: Checks, kind: str, make: Callable[[], Path]) -> tuple[bool, str]:
    import transformers

    path, device = make(), torch.device(checks.device)
    spec = fit_model(load_model_spec(path), path)
    vision, towers = spec.vision, dict[torch.dtype, Tower]()
    assert vision is not None
    for dtype in (torch.float32, torch.bfloat16):
        weights = load_decoder_weights(WeightShare(spec, dtype, 0, 1, device=device), path).vision
        assert weights is not None
        towers[dtype] = make_tower(vision, weights, _operations(device), TensorParallel())
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    worst, cosine = 0.0, 1.0
    with torch.inference_mode():
        for seed, grid in enumerate(GRIDS[kind]):
            values = torch.randn(vision.input_shape(grid), generator=torch.Generator().manual_seed(seed))
            expected = embeddings_of(model, values, grid)
            wide, short = (towers[dtype](values.to(device), grid).float().cpu() for dtype in towers)
            worst = max(worst, float((wide - expected).abs().max()))
            cosine = min(cosine, float(torch.cosine_similarity(short, expected).min()))
    is_ok = worst <= ERROR and cosine > 0.995
    return is_ok, f"{len(GRIDS[kind])} images, off by at most {worst:.1e}, least cosine in bfloat16 {cosine:.5f}"


def _case(path: Path) -> tuple[Path, list[Prompt], list[list[int]]]:
    made = Prompts(path)
    asked = [
        made.make(f"What is in this image? {IMAGE} Describe it.", [image(120, 90)]),
        made.make(f"What is in this image? {IMAGE} Describe it.", [image(120, 90, 1)]),
        made.make(f"{IMAGE} and{IMAGE} What is in that one?", [image(90, 150, 2), image(230, 60, 3)]),
        made.make("Describe the colours, please.", []),
        made.make(f"{IMAGE}", [image(200, 200, 1)]),
    ]
    return path, asked, greedy(path, asked, NUM_NEW_TOKENS)


def _check_tokens(checks: Checks, case: Callable[[], Any], name: str, options: dict[str, Any]) -> tuple[bool, str]:
    path, asked, expected = case()
    more = {"max_num_batched_tokens": 64, "max_model_len": 256} | options
    if "preemption" in name:
        more["num_gpu_blocks_override"] = 46 if path.name == GEMMA3 else 30
    num_graphs = 0
    capture = CudaCapture.__call__

    def count(self: CudaCapture, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        nonlocal num_graphs
        num_graphs += 1
        return capture(self, compute)

    with mock.patch.object(CudaCapture, "__call__", count), engine(path, checks.device, **more) as core:
        # the second time, prompts are in the prefix cache, and decodes run as graphs
        found = [tokens for _ in range(2) for tokens in _generate(core, asked)]
        load = core.load()
    num_equal = sum(one == other for one, other in zip(found, expected * 2, strict=True))
    figures = f"{num_equal} of {len(found)} answers equal, {num_graphs} graphs, {load.num_preemptions} preemptions"
    has_tested = load.num_preemptions > 0 if "preemption" in name else True
    if "graphs" in name:
        has_tested = load.prefix_cache_hits > 0 and (num_graphs > 0 or checks.device == "cpu")
        figures += f", {load.prefix_cache_hits} cached tokens"
    return num_equal == len(found) and has_tested, figures


def _generate(core: EngineCore, asked: list[Prompt]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    for seq_id, prompt in enumerate(asked):
        features = {"features": prompt.features, "feature_data": [*prompt.data]}
        core.submit(EngineRequest(seq_id, str(seq_id), prompt.token_ids, params, seed=0, **features))
    found: list[list[int]] = [[] for _ in asked]
    while core.has_work():
        outputs = core.step()
        if outputs is None:
            continue
        assert not [each for each in outputs.finished if each.finish_reason in ("error", "failed")]
        for seq_id, token_id in zip(outputs.seq_ids.tolist(), outputs.token_ids.tolist(), strict=True):
            found[seq_id].append(token_id)
    return found


def measure_images(device: Device, is_toy: bool, report: Report, deadline_s: float) -> None:
    """Report how long encoders with random weights take in bfloat16, and how long the host takes to launch them."""
    report(f"\n## Images{' (toy)' if is_toy else ''}\n")
    report("| encoder | patches | tokens | ms | ms of the host | Tflop/s of linear layers |")
    report("|---|---:|---:|---:|---:|---:|")
    for name, sizes in REAL.items():
        if time.monotonic() > deadline_s:
            report(f"skipped {name}: out of time")
            continue
        _measure_tower(name, sizes, torch.device(device), is_toy, report)


def _measure_tower(name: str, sizes: dict[str, Any], device: torch.device, is_toy: bool, report: Report) -> None:
    spec = _spec(sizes, is_toy)
    generator = torch.Generator(device).manual_seed(0)
    weights = {
        each.key: torch.randn(each.shape, device=device, dtype=torch.bfloat16, generator=generator)
        / math.sqrt(max(1, math.prod(each.shape[1:])))
        for each in vision_tensors(spec)
    }
    num_weights = sum(weight.numel() for key, weight in weights.items() if "blocks" in key or "layers" in key)
    tower = make_tower(spec, weights, _operations(device), TensorParallel())
    sides = [4] if is_toy else [32, 64, 96]
    for side in [spec.image_size // spec.patch_size] if spec.image_size else sides:
        grid = (1, side, side) if spec.image_size is None else (1, *[round(spec.tokens_per_image**0.5)] * 2)
        values = torch.randn(spec.input_shape(grid), device=device, generator=generator)
        hosts: list[float] = []
        times: list[float] = []
        with torch.inference_mode():
            for _ in range(3 if is_toy else 8):
                _wait(device)
                started_s = time.perf_counter()
                tokens = len(tower(values, grid))
                hosts.append(time.perf_counter() - started_s)
                _wait(device)
                times.append(time.perf_counter() - started_s)
        took_s, host_s = (float(np.median(each[2:])) for each in (times, hosts))
        rate = 2 * num_weights * side**2 / took_s / 1e12
        report(f"| {name} | {side**2:,} | {tokens} | {took_s * 1e3:.2f} | {host_s * 1e3:.2f} | {rate:.0f} |")


def _spec(sizes: dict[str, Any], is_toy: bool) -> VisionSpec:
    """Return a spec with the vision part of `sizes`: everything else is that of a small checkpoint."""
    own = {name: value for name, value in sizes.items() if name != "kind"}
    with tempfile.TemporaryDirectory(prefix="raycore_gpu_") as directory:
        path = make_vision_checkpoint(sizes["kind"], Path(directory))
        config = json.loads((path / "config.json").read_text())
        if not is_toy:
            config["vision_config"] |= own
            if sizes["kind"] == GEMMA3:
                config["mm_tokens_per_image"] = 256
            else:
                size = own["out_hidden_size"]
                # heads of the model of texts stay as large as rotations expect
                text = {"hidden_size": size, "num_attention_heads": size // 16, "num_hidden_layers": 4}
                config["text_config"] |= text
        (path / "config.json").write_text(json.dumps(config))
        vision = load_model_spec(path).vision
    assert vision is not None
    return vision


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
