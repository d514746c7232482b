"""Measurements of `benchmarks/gpu.py`: steps of models with random weights, beside what the device's memory and
matrix units could do.

Caches hold random numbers, in blocks in random order, so no prompt is computed to time a decode. The time of the host
is that of launching a step, without the scheduler.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import median
from gpu.checks import Report
from gpu.engines import Device, int32, make_core
from gpu_rooflines import MODELS, TOY_SIZES, Rates, decode_bytes, measure_rates, model_bytes, prompt_flops
from torch.profiler import ProfilerActivity, profile

from raycore.attention.kv_tensors import KVTensors
from raycore.checkpoint.model_spec import load_model_spec
from raycore.executor.base import Executor
from raycore.messages import EngineRequest, NewRequest, StepPlan, StepResult
from raycore.models.spec import ModelSpec
from raycore.rpc.pending import Pending
from raycore.sampling_params import SamplingParams

MAX_GAP_US = 20.0
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Scale:
    """What is measured of each model, and how often."""

    batches: tuple[int, ...] = (1, 16, 64, 256)
    contexts: tuple[int, ...] = (512, 8192)
    prompts: tuple[int, ...] = (2048, 8192)
    profiled_batch: int = 64
    runs: int = 5
    steps: int = 12
    """Decode steps of a run. A prompt has a quarter."""
    rate_bytes: int = 4 << 30
    rate_dim: int = 8192

    @property
    def max_steps(self) -> int:
        """An upper bound on the number of steps of one sequence."""
        return self.runs * self.steps + 8


TOY = Scale((1, 4), (32, 96), (32, 64), profiled_batch=4, runs=2, steps=4, rate_bytes=1 << 24, rate_dim=128)


class NoisyCache(KVTensors):
    """A KV cache with random numbers in it, so that tokens differ, and go to different experts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for layer in self.blocks:
            layer.normal_()


def measure_model(
    name: str, device: Device, scale: Scale, report: Report, deadline_s: float, trace: Path | None
) -> None:
    """Start an engine with a model's shape, and report its tables. Stops at `deadline_s` of `time.monotonic`.

    Args:
        trace: where the profile of decode steps is saved. None: nowhere.
    """
    is_toy = scale is TOY
    report(f"\n## {name}{' (toy)' if is_toy else ''}\n")
    with tempfile.TemporaryDirectory(prefix="raycore_gpu_") as directory:
        path = Path(directory)
        (path / "config.json").write_text(json.dumps(MODELS[name] | (TOY_SIZES if is_toy else {})))
        spec = load_model_spec(path)
        reason = _why_too_large(spec, device)
        if time.monotonic() + _start_s(spec, device) > deadline_s:
            reason = "out of time"
        if reason is not None:
            report(f"skipped {name}: {reason}")
            return
        rates = measure_rates(torch.device(device), scale.rate_bytes, scale.rate_dim)
        report(rates.text(torch.device(device)))
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with mock.patch("raycore.attention.paged_cache.KVTensors", NoisyCache):
            _Measurement(path, name, spec, device, scale, rates, report, deadline_s).run(trace)


class _Measurement:
    """An engine with random weights, of which steps are timed."""

    def __init__(
        self,
        path: Path,
        name: str,
        spec: ModelSpec,
        device: Device,
        scale: Scale,
        rates: Rates,
        report: Report,
        deadline_s: float,
    ) -> None:
        self._name, self._spec, self._scale, self._rates = name, spec, scale, rates
        self._device: Device = device
        self._report, self._deadline_s = report, deadline_s
        longest = max(*scale.contexts, *scale.prompts)
        options: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": longest + scale.max_steps + 8,
            "max_num_seqs": max(scale.batches),
            "max_num_batched_tokens": max(*scale.prompts, *scale.batches),
            "num_gpu_blocks_override": None,
            "gpu_memory_utilization": 0.95,
            "async_scheduling": True,
            "enable_prefix_caching": False,
            "num_threads": 1 if scale is TOY else None,
        }
        if device == "cpu":
            options["kv_cache_memory_bytes"] = 16 << 20
        started_s = time.perf_counter()
        self._core = make_core(path, device, **options)
        self._first_token_s = self._run_first_token(started_s)
        self._block_size = self._core.config.cache.block_size
        self._blocks = np.random.default_rng(0).permutation(self._core.cache.num_blocks).astype(np.int32)
        self._core.executor.execute(StepPlan(-4, freed_slots=[0]))

    def run(self, trace: Path | None) -> None:
        """Report start, decodes, prompts, memory and a profile."""
        timings = ", ".join(f"{name} {value:.2f} s" for name, value in self._core.timings_s.items())
        tokens = self._core.cache.num_blocks * self._block_size
        self._report(f"first token after {self._first_token_s:.2f} s ({timings}); the cache holds {tokens} tokens\n")
        row = "| {} | {} | {} | {} | {} | {} | {} | {} |".format
        self._report(row("model", "step", "batch", "context", "step ms", "tokens/s", "of the roofline", "host ms"))
        self._report(row(*["---"] * 3, *["---:"] * 5))
        for context in self._scale.contexts:
            for batch in self._scale.batches:
                self._report(row(self._name, "decode", batch, context, *self._decode_figures(batch, context)))
        for num_tokens in self._scale.prompts:
            self._report(row(self._name, "prompt", 1, num_tokens, *self._prompt_figures(num_tokens)))
        self._report(f"\npeak memory: {self._peak_memory()}\n")
        self._profile(trace)
        self._core.shutdown()

    def _run_first_token(self, started_s: float) -> float:
        self._core.submit(EngineRequest(0, "first", [1, 2, 3], SamplingParams(temperature=0, max_tokens=1), seed=0))
        while self._core.has_work():
            self._core.step()
        return time.perf_counter() - started_s

    def _decode_figures(self, batch: int, context: int) -> list[str]:
        if (reason := self._why_skipped(batch, context)) is not None:
            return [reason, "", "", ""]
        steps = _Steps(self._core.executor, self._decode_plans(batch, context))
        steps.run(4)  # compiles kernels, and captures a graph
        step_s, host_s = steps.measure(self._scale.runs, self._scale.steps)
        self._end(steps, batch)
        mean_context = context + self._scale.max_steps // 2
        least_s = decode_bytes(self._spec, batch, mean_context) / self._rates.bytes
        return _figures(step_s, batch, least_s, host_s)

    def _prompt_figures(self, num_tokens: int) -> list[str]:
        if (reason := self._why_skipped(2, num_tokens)) is not None:
            return [reason, "", "", ""]
        steps = _Steps(self._core.executor, self._prompt_plans(num_tokens))
        steps.run(2)
        step_s, host_s = steps.measure(self._scale.runs, self._scale.steps // 4)
        self._end(steps, 2)
        return _figures(step_s, num_tokens, prompt_flops(self._spec, num_tokens) / self._rates.flops, host_s)

    def _why_skipped(self, batch: int, num_tokens: int) -> str | None:
        needed = batch * self._blocks_each(num_tokens)
        if needed > len(self._blocks):
            return "does not fit"
        return "out of time" if time.monotonic() > self._deadline_s else None

    def _blocks_each(self, num_tokens: int) -> int:
        return -(-(num_tokens + self._scale.max_steps) // self._block_size)

    def _request(self, slot: int, num_tokens: int, num_computed: int) -> NewRequest:
        """A request with blocks of its own, for all of its steps."""
        size = self._blocks_each(num_tokens)
        token_ids = np.random.default_rng(slot).integers(0, self._spec.vocab_size, num_tokens)
        blocks = self._blocks[slot * size : (slot + 1) * size]
        return NewRequest(slot, int32(token_ids), num_tokens, num_computed, blocks.tobytes(), GREEDY, seed=slot)

    def _decode_plans(self, batch: int, context: int) -> Iterator[StepPlan]:
        slots = int32(range(batch))
        requests = [self._request(slot, context, context - 1) for slot in range(batch)]
        yield StepPlan(0, slots, new_requests=requests)
        for step in count(1):
            yield StepPlan(step, slots)

    def _prompt_plans(self, num_tokens: int) -> Iterator[StepPlan]:
        """Two slots take turns: a slot is freed while the other one's prompt is computed."""
        freed: list[int] = []
        for step in count():
            request = self._request(step % 2, num_tokens, 0)
            yield StepPlan(step, int32([step % 2]), int32([num_tokens]), freed, [request])
            freed = [step % 2]

    def _end(self, steps: _Steps, num_slots: int) -> None:
        steps.drain()
        self._core.executor.execute(StepPlan(-4, freed_slots=list(range(num_slots))))

    def _peak_memory(self) -> str:
        if self._device == "cpu":
            return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of the process"
        free, total = torch.cuda.mem_get_info()
        allocated, used = torch.cuda.max_memory_allocated() / 2**30, (total - free) / 2**30
        return f"{allocated:.2f} GiB allocated by torch; {used:.2f} of {total / 2**30:.2f} GiB in use now"

    def _profile(self, trace: Path | None) -> None:
        context = min(self._scale.contexts)
        fitting = [batch for batch in self._scale.batches if self._why_skipped(batch, context) is None]
        if not fitting:
            self._report("skipped the profile: out of time")
            return
        batch = min(max(fitting), self._scale.profiled_batch)
        steps = _Steps(self._core.executor, self._decode_plans(batch, context))
        steps.run(6)
        steps.drain()
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._device == "cuda" else [])
        num_profiled = 4
        with profile(activities=activities) as profiled:
            steps.run(num_profiled)
            steps.drain()
        self._end(steps, batch)
        with tempfile.TemporaryDirectory(prefix="raycore_gpu_") as directory:
            path = trace or Path(directory) / "trace.json"
            profiled.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        for line in profile_lines(events, self._device, num_profiled, batch, context):
            self._report(line)
        if trace is not None:
            self._report(f"\nChrome trace: {trace}")


class _Steps:
    """Runs plans with two steps in flight."""

    def __init__(self, executor: Executor, plans: Iterator[StepPlan]) -> None:
        self._executor, self._plans = executor, plans
        self._in_flight: deque[Pending[StepResult]] = deque()
        self._host_s = 0.0

    def run(self, num_steps: int) -> None:
        """Launch so many steps, and wait for all but the last."""
        for _ in range(num_steps):
            plan = next(self._plans)
            started_s = time.perf_counter()
            self._in_flight.append(self._executor.execute(plan))
            self._host_s += time.perf_counter() - started_s
            if len(self._in_flight) > 1:
                self._in_flight.popleft().result()

    def measure(self, num_runs: int, num_steps: int) -> tuple[float, float]:
        """Return the medians over several runs: seconds a step takes, and seconds that launching one takes."""
        step_s: list[float] = []
        host_s: list[float] = []
        for _ in range(num_runs):
            self._host_s, started_s = 0.0, time.perf_counter()
            self.run(num_steps)
            step_s.append((time.perf_counter() - started_s) / num_steps)
            host_s.append(self._host_s / num_steps)
        return median(step_s), median(host_s)

    def drain(self) -> None:
        """Wait for all steps."""
        while self._in_flight:
            self._in_flight.popleft().result()


def _figures(step_s: float, num_tokens: int, least_s: float, host_s: float) -> list[str]:
    return [f"{step_s * 1e3:.3f}", f"{num_tokens / step_s:,.0f}", f"{least_s / step_s:.0%}", f"{host_s * 1e3:.3f}"]


def _why_too_large(spec: ModelSpec, device: Device) -> str | None:
    if device == "cpu":
        return None
    total, needed = torch.cuda.get_device_properties(0).total_memory, model_bytes(spec) + (6 << 30)
    if needed <= 0.95 * total:
        return None
    return f"{model_bytes(spec) / 2**30:.1f} GiB of weights do not fit into {total / 2**30:.1f} GiB"


def _start_s(spec: ModelSpec, device: Device) -> float:
    """Estimate how long an engine takes to start: making up weights, and compiling kernels."""
    return 0.5 if device == "cpu" else 15 + model_bytes(spec) / 10e9


# ---- profiles


def profile_lines(events: list[dict[str, Any]], device: Device, num_steps: int, batch: int, context: int) -> list[str]:
    """Return the kernels that take most of the steps' time, and the gaps between kernels, from a Chrome trace."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if device == "cuda" else ("cpu_op",)
    found = sorted((event for event in events if event.get("cat") in kinds), key=lambda event: event["ts"])
    if not found:
        return ["the profiler recorded no kernels"]
    times_us: dict[str, list[float]] = defaultdict(list)
    for event in found:
        times_us[event["name"]].append(event["dur"])
    total_us = sum(map(sum, times_us.values()))
    longest = sorted(times_us.items(), key=lambda item: -sum(item[1]))[:10]
    lines = [f"profile of {num_steps} decode steps, batch {batch}, context {context}\n"]
    lines += ["| kernel | calls | ms, all steps | share |", "| --- | ---: | ---: | ---: |"]
    for name, durations in longest:
        cell = name.replace("|", "/")[:80]
        lines.append(f"| `{cell}` | {len(durations)} | {sum(durations) / 1e3:.3f} | {sum(durations) / total_us:.0%} |")
    if device == "cuda":
        lines.append(f"\n{_gaps(found)}")
    return lines


def _gaps(events: list[dict[str, Any]]) -> str:
    end_us, gaps_us = events[0]["ts"], []
    for event in events:
        if event["ts"] > end_us:
            gaps_us.append((event["ts"] - end_us, event["name"]))
        end_us = max(end_us, event["ts"] + event["dur"])
    large = sorted((gap for gap in gaps_us if gap[0] > MAX_GAP_US), reverse=True)
    idle = sum(gap for gap, _ in gaps_us) / (end_us - events[0]["ts"])
    worst = "; ".join(f"{gap:.0f} µs before `{name[:60]}`" for gap, name in large[:5])
    return f"idle {idle:.1%} of the time; gaps above {MAX_GAP_US:.0f} µs: {len(large)}{': ' + worst if worst else ''}"
