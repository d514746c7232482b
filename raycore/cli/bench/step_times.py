"""`raycore bench step-times`: measures an engine's steps in this process, for `raycore simulate`.

One worker computes steps of a grid: so many tokens of prompts, so many decoding sequences, so long contexts. Sequences
begin with contexts that nobody has computed, which take as long to read. Where all sequences together have more tokens
than the KV cache holds, they share blocks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from raycore.cli.engine_options import chosen_engine_options
from raycore.cli.output import save
from raycore.config import EngineConfig, resolve
from raycore.engine.core import EngineCore
from raycore.engine.mailbox import Mailbox
from raycore.errors import InvalidConfig
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest, NewRequest, StepPlan, StepResult
from raycore.node.versions import cuda_of_torch, hardware, versions
from raycore.rpc.pending import Callback, PendingCall
from raycore.sampling_params import SamplingParams
from raycore.simulation.step_times import FORMAT, Grid, Line, Measurement, as_json
from raycore.worker.rank import RankIdentity

_PROMPTS = (16, 64, 256, 1024, 4096, 16384)
_DECODES = (1, 4, 16, 64, 256, 1024)
_CONTEXTS = (16, 256, 2048, 16384, 131072)
_MOST_PROMPTS = 16
"""Prompts of a step, to see what each costs."""
_GPUS = Path("/proc/driver/nvidia/gpus")


def bench_step_times(args: argparse.Namespace) -> int:
    """Measure the steps, and write them to a file."""
    for name in ("timings", "seconds_per_point"):
        if not getattr(args, name) > 0:
            raise InvalidConfig(f"--{name.replace('_', '-')} {getattr(args, name)} isn't positive")
    chosen = chosen_engine_options(args)
    measurement = measure(chosen, args.timings, args.seconds_per_point, shows_progress=sys.stderr.isatty())
    save(Path(args.output), as_json(measurement))
    grid = measurement.grid
    first, last = grid.seconds[0][1][0], grid.seconds[-1][0][0]
    assert first is not None
    assert last is not None
    print(
        f"{measurement.hardware}, {measurement.dtype}: a step of 1 decode takes {first * 1e3:.2f} ms, one of a prompt"
    )
    print(
        f"of {grid.prompt_tokens[-1]} tokens {last * 1e3:.2f} ms, and the engine {measurement.engine(1) * 1e3:.2f} ms"
    )
    return 0


def measure(
    options: dict[str, Any], num_timings: int = 10, point_s: float = 2.0, *, shows_progress: bool = False
) -> Measurement:
    """Measure an engine's steps.

    Args:
        options: the engine's.
        num_timings: how often each step is measured.
        point_s: after so many seconds, a step is measured no more. Each is measured once at least.

    Raises:
        InvalidConfig: an option is invalid, or the engine has several workers, or its model keeps states.
    """
    config = _configured(options)
    executor = _TimedExecutor(config, RankIdentity(0, 1))
    core = EngineCore(config, executor)
    try:
        steps = _Steps(core, executor, num_timings, point_s)
        grid, after = _measure_grid(steps, options, shows_progress)
        per_prompt_s = _measure_prompts(steps)
        steps.end()
        limits = core.config.scheduler
        engine, per_request_s = _measure_engine(
            core, executor, _up_to(_DECODES[::2], limits.max_num_seqs - _MOST_PROMPTS)
        )
        return Measurement(
            format=FORMAT,
            model=str(options["model"]),
            hardware=hardware(),
            versions=versions(),
            dtype=executor.dtype_name(),
            options={name: value for name, value in options.items() if isinstance(value, (str, int, float, bool))},
            max_steps_in_flight=config.max_steps_in_flight,
            cache=core.cache,
            num_blocks_in_memory=executor.num_blocks_in_memory(core),
            grid=grid,
            after_context_s=after,
            per_prompt_s=per_prompt_s,
            engine=engine,
            engine_per_request_s=per_request_s,
        )
    finally:
        core.shutdown()


def _configured(options: dict[str, Any]) -> EngineConfig:
    """The configuration of the measured engine. It has room for prompts beside all decodes."""
    if options.get("device", "auto") == "auto":
        is_gpu = cuda_of_torch() is not None and any(_GPUS.glob("*"))
        options = {**options, "device": "cuda" if is_gpu else "cpu"}
    options = {**options, "data_parallel_size": 1}
    config = resolve(**options)
    if config.parallel.world_size > 1:
        raise InvalidConfig("bench step-times measures one worker: omit tensor_parallel_size and other parallelism")
    if config.state_rows is not None or config.model.spec.pooling is not None or config.speculative_config is not None:
        raise InvalidConfig("bench step-times measures models that generate, keep no states, and don't speculate")
    limits = config.scheduler
    wider: dict[str, Any] = {
        "max_num_seqs": limits.max_num_seqs + _MOST_PROMPTS,
        "max_num_batched_tokens": limits.max_num_batched_tokens + limits.max_num_seqs + _MOST_PROMPTS,
    }
    return resolve(**{**options, **wider})


class _TimedExecutor(InlineExecutor):
    """Adds up the time in which it computes, or waits for the device."""

    spent_s = 0.0
    _available: list[int] | None = None

    def execute(self, plan: StepPlan) -> PendingCall[StepResult]:
        begun_s = time.perf_counter()
        pending = super().execute(plan)
        self.spent_s += time.perf_counter() - begun_s
        return _Timed(pending, self)

    def determine_available_memory(self) -> list[int]:
        self._available = super().determine_available_memory()
        return self._available

    def num_blocks_in_memory(self, core: EngineCore) -> int | None:
        """Blocks that the worker has memory for. None: an option says how many there are."""
        if self._available is None:
            return None
        (spec,) = self.get_kv_cache_specs()
        return self._available[0] // max(1, core.cache.layout.block_bytes(spec))


class _Timed:
    """A `PendingCall` whose waiting is timed."""

    def __init__(self, pending: PendingCall[StepResult], executor: _TimedExecutor) -> None:
        self._pending, self._executor = pending, executor

    def done(self) -> bool:
        return self._pending.done()

    def add_done_callback(self, callback: Callback) -> None:
        self._pending.add_done_callback(callback)

    def result(self, timeout: float | None = None) -> StepResult:
        begun_s = time.perf_counter()
        try:
            return self._pending.result(timeout)
        finally:
            self._executor.spent_s += time.perf_counter() - begun_s


@dataclass
class _Steps:
    """Has the worker compute the same step again and again."""

    core: EngineCore
    executor: _TimedExecutor
    num_timings: int
    point_s: float
    _number: int = 0
    _begun: int = 0
    """Number of slots that decode."""

    @property
    def room(self) -> int:
        """Number of tokens that decodes need beyond their contexts."""
        return self.num_timings + 4

    def seconds(self, prompts: Sequence[int], num_decodes: int, context: int, prompt_context: int = 0) -> float:
        """The median time of a step with so many decodes, and prompts with these numbers of tokens."""
        freed = list(range(self._begun))
        self._begun = num_decodes
        decodes = [self._request(slot, context, context - 1) for slot in range(num_decodes)]
        later = [
            self._request(num_decodes + index, prompt_context + count, prompt_context)
            for index, count in enumerate(prompts)
        ]
        slots = _int32([request.slot for request in (*decodes, *later)])
        counts = _int32([*[1] * num_decodes, *prompts])
        of_prompts = [request.slot for request in later]

        def plans() -> Iterator[StepPlan]:
            yield StepPlan(self._next(), slots, counts, freed, [*decodes, *later])
            while True:
                yield StepPlan(self._next(), slots, counts if prompts else b"", of_prompts, later)

        taken_s = self._run(plans())
        self.executor.execute(StepPlan(self._next(), freed_slots=of_prompts)).result()
        return float(np.median(taken_s))

    def end(self) -> None:
        """Free all slots, and let the engine number its steps."""
        self.executor.execute(StepPlan(self._next(), freed_slots=list(range(self._begun)))).result()

    def _run(self, plans: Iterator[StepPlan]) -> list[float]:
        depth, begun_s = self.executor.max_concurrent_batches, time.perf_counter()
        in_flight: deque[PendingCall[StepResult]] = deque()
        taken_s: list[float] = []
        num_warm = 1 + (depth > 1)
        plan, last_s = next(plans), begun_s
        while len(taken_s) < self.num_timings + num_warm:
            following = next(plans)
            started_s = time.perf_counter()
            in_flight.append(self.executor.execute(plan))
            plan = following
            if len(in_flight) == depth:
                in_flight.popleft().result()
                ended_s = time.perf_counter()
                taken_s.append(ended_s - (started_s if depth == 1 else last_s))
                last_s = ended_s
                if ended_s - begun_s > self.point_s and len(taken_s) > num_warm:
                    break
        for pending in in_flight:
            pending.result()
        return taken_s[num_warm:]

    def _request(self, slot: int, num_tokens: int, num_computed: int) -> NewRequest:
        layout, num_blocks = self.core.cache.layout, self.core.cache.num_blocks
        size = layout.limits.block_size
        each = -(-(num_tokens + self.room) // size)
        blocks = (slot * each + np.arange(each)) % num_blocks
        tokens = np.random.default_rng(slot).integers(0, self.core.config.model.spec.vocab_size, num_tokens)
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        return NewRequest(
            slot, _int32(tokens), num_tokens, num_computed, _int32(np.repeat(blocks, layout.num_groups)), params, slot
        )

    def _next(self) -> int:
        self._number += 1
        return self._number - 1


def _measure_grid(steps: _Steps, options: dict[str, Any], shows_progress: bool) -> tuple[Grid, Line]:
    limits = steps.core.config.scheduler
    num_seqs = limits.max_num_seqs - _MOST_PROMPTS
    longest = limits.max_model_len - steps.room
    if longest < 2:
        raise InvalidConfig(
            f"max_model_len={limits.max_model_len} leaves no room for {steps.room} steps: lower timings"
        )
    prompts = [0, *_up_to(_PROMPTS, limits.max_num_batched_tokens - limits.max_num_seqs)]
    decodes, contexts = [0, *_up_to(_DECODES, num_seqs)], _up_to(_CONTEXTS, longest)
    points = [(p, n, c) for p in prompts for n in decodes for c in (contexts if n else contexts[:1]) if p or n]
    found: dict[tuple[int, int, int], float] = {}
    for p, n, c in tqdm(points, disable=not shows_progress):
        found[p, n, c] = steps.seconds(_parts(p, longest), n, c)
    seconds = [[[found.get((p, n, c if n else contexts[0])) for c in contexts] for n in decodes] for p in prompts]
    return Grid(prompts, decodes, contexts, seconds), _measure_contexts(steps, longest)


def _measure_contexts(steps: _Steps, longest: int) -> Line:
    """Seconds that each token of a prompt's chunk takes more, by the number of tokens before the chunk."""
    count = min(256, longest // 2)
    alone_s = steps.seconds([count], 0, 0)
    before = [each for each in _up_to(_CONTEXTS, longest - count) if each > 1]
    later_s = [(steps.seconds([count], 0, 0, each) - alone_s) / count for each in before]
    return Line([0.0, *map(float, before)], [0.0, *(max(0.0, each) for each in later_s)])


def _measure_prompts(steps: _Steps) -> float:
    """How much longer a step takes for each further prompt."""
    limits = steps.core.config.scheduler
    count = min(1024, limits.max_model_len // 2, limits.max_num_batched_tokens - limits.max_num_seqs)
    each = max(2, count // _MOST_PROMPTS)
    several = [each] * max(2, min(_MOST_PROMPTS, count // each))
    one_s, many_s = steps.seconds([sum(several)], 0, 0), steps.seconds(several, 0, 0)
    return max(0.0, (many_s - one_s) / (len(several) - 1))


def _measure_engine(core: EngineCore, executor: _TimedExecutor, counts: Sequence[int]) -> tuple[Line, float]:
    """The engine's own time around steps of decodes, by their number, and what each request takes besides."""
    values, per_request_s = list[float](), list[float]()
    length = min(256, core.config.scheduler.max_model_len - 24)
    for index, count in enumerate(counts):
        mailbox = Mailbox()
        stream = mailbox.outputs(0)
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
        own_s, num_steps = list[float](), 0
        started_s, computed_s = time.perf_counter(), executor.spent_s
        for number in range(count):
            seq_id = index * 10000 + number
            tokens = np.random.default_rng(seq_id).integers(0, core.config.model.spec.vocab_size, length).tolist()
            core.submit(EngineRequest(seq_id, str(seq_id), tokens, params, seed=seq_id))
        while core.has_work():
            begun_s, before_s = time.perf_counter(), executor.spent_s
            mailbox.take(core.wait_s())
            core.release_prepared()
            outputs = core.step()
            num_steps += 1
            if outputs is not None:
                mailbox.publish(outputs, core.load())
                next(stream)
                if len(outputs.seq_ids) == count:
                    own_s.append(time.perf_counter() - begun_s - (executor.spent_s - before_s))
        mailbox.close()
        values.append(float(np.median(own_s)) if own_s else 0.0)
        took_s = time.perf_counter() - started_s - (executor.spent_s - computed_s)
        per_request_s.append(max(0.0, took_s - num_steps * values[-1]) / count)
    return Line([float(each) for each in counts], values), float(np.median(per_request_s))


def _parts(num_tokens: int, longest: int) -> list[int]:
    """Divide so many tokens among as few prompts as can be. None has a single token."""
    count = -(-num_tokens // longest)
    return [num_tokens // count + (index < num_tokens % count) for index in range(count)]


def _up_to(points: Sequence[int], most: int) -> list[int]:
    """The points below a limit, and the limit."""
    return [*(each for each in points if each * 1.5 <= most), most]


def _int32(values: Sequence[int] | NDArray[Any]) -> bytes:
    return np.asarray(values, np.int32).tobytes()
