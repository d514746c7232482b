"""Simulates one setting or a grid of them, and puts their figures side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from raycore.cache_layout import KVCacheConfig
from raycore.config import ENGINE_OPTIONS, EngineConfig, resolve
from raycore.errors import InvalidConfig, InvalidInput
from raycore.options.declared import suggestion
from raycore.simulation.autoscaling import AutoscalingOptions
from raycore.simulation.deployment import Deployment, Kill, Plan
from raycore.simulation.outcome import Outcome
from raycore.simulation.roofline import Device, Roofline
from raycore.simulation.step_times import MeasuredTimes, StepTimes
from raycore.simulation.traces import TracedRequest


@dataclass(frozen=True)
class Scenario:
    """What is the same in all settings."""

    trace: Sequence[TracedRequest]
    measured: MeasuredTimes | None = None
    """None: there is a `device`."""
    device: Device | None = None
    overhead_s: float = 0.0
    kills: Sequence[Kill] = ()
    detection_s: float = 0.5
    replacement_s: float = 30.0
    autoscaling: AutoscalingOptions | None = None
    start_s: float = 60.0


@dataclass(frozen=True)
class Simulated:
    """A setting, and what became of it."""

    setting: dict[str, Any]
    """The options of the grid."""
    outcome: Outcome
    figures: dict[str, Any]


def parse_grid(given: Sequence[str]) -> dict[str, list[Any]]:
    """Read `NAME=VALUE,VALUE` of options of an engine.

    Raises:
        InvalidConfig: an option is unknown, or a value is invalid. The message names it.
    """
    grid: dict[str, list[Any]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or not values:
            raise InvalidConfig(f"--grid {text!r} isn't NAME=VALUE,VALUE, such as max_num_seqs=64,128")
        if name not in ENGINE_OPTIONS:
            raise InvalidConfig(f"--grid {text!r}: unknown option {name!r}{suggestion(name, ENGINE_OPTIONS)}")
        try:
            grid[name] = [ENGINE_OPTIONS[name].parse(value) for value in values.split(",")]
        except InvalidInput as error:
            raise InvalidConfig(f"--grid {text!r}: {error}") from None
    return grid


def parse_kill(text: str) -> Kill:
    """Read `RANK@SECONDS`.

    Raises:
        InvalidConfig: it isn't that.
    """
    rank, _, at_s = text.partition("@")
    try:
        kill = Kill(int(rank), float(at_s))
    except ValueError:
        kill = Kill(-1, -1.0)
    if kill.rank < 0 or not 0 <= kill.at_s < float("inf"):
        raise InvalidConfig(f"--kill {text!r} isn't RANK@SECONDS, such as 2@600")
    return kill


def simulate(
    options: Mapping[str, Any],
    grid: Mapping[str, Sequence[Any]],
    scenario: Scenario,
    progress: Callable[[str], object] = lambda setting: None,
) -> list[Simulated]:
    """Simulate every setting of a grid. Without one, there is one setting.

    Args:
        options: those of the engine that aren't in the grid.
        progress: is told of each setting before it is simulated.

    Raises:
        InvalidConfig: an option is invalid, or the step times are of something else.
    """
    found: list[Simulated] = []
    for values in itertools.product(*grid.values()):
        setting = dict(zip(grid, values, strict=True))
        progress(", ".join(f"{name}={value}" for name, value in setting.items()))
        config = resolve(**{**options, **setting})
        plan = _plan(config, scenario)
        outcome = Deployment(config, plan).run(scenario.trace)
        figures = outcome.figures()
        if scenario.kills:
            whole = Deployment(config, replace(plan, kills=())).run(scenario.trace).figures()
            figures["without_failures"] = {name: value for name, value in whole.items() if name in COMPARED}
        found.append(Simulated(setting, outcome, figures))
    return found


COMPARED = (
    *("duration_s", "output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s"),
    *("e2el_p50_s", "e2el_p99_s"),
)
"""The figures that say what failures cost."""


def _plan(config: EngineConfig, scenario: Scenario) -> Plan:
    times: StepTimes
    _check(config)
    if scenario.measured is not None:
        times, cache = scenario.measured, _measured_cache(config, scenario.measured)
    else:
        assert scenario.device is not None
        times = Roofline(config, scenario.device, scenario.overhead_s)
        cache = times.cache(config)
    for kill in scenario.kills:
        if scenario.autoscaling is None and kill.rank >= config.parallel.data_parallel_size:
            raise InvalidConfig(
                f"--kill {kill.rank}@{kill.at_s:g}: there is no rank {kill.rank} with data_parallel_size="
                f"{config.parallel.data_parallel_size}"
            )
    return Plan(
        cache,
        times,
        scenario.kills,
        scenario.detection_s,
        scenario.replacement_s,
        scenario.autoscaling,
        scenario.start_s,
    )


def _check(config: EngineConfig) -> None:
    """Refuse what isn't simulated.

    Raises:
        InvalidConfig: an option asks for it.
    """
    others = {
        "speculative_config": config.speculative_config,
        "kv_transfer_config": config.kv_transfer_config,
        "enable_expert_parallel with several ranks": config.parallel.is_lockstep or None,
        "pipeline_parallel_size": config.parallel.pipeline_parallel_size > 1 or None,
        "a model that keeps states": config.state_rows,
        "a model that pools": config.model.spec.pooling,
    }
    for name, value in others.items():
        if value is not None:
            raise InvalidConfig(f"simulate doesn't know {name}: omit it")


def _measured_cache(config: EngineConfig, times: MeasuredTimes) -> KVCacheConfig:
    """The cache of a rank with the memory of the measured one."""
    measurement = times.measurement
    if config.parallel.tensor_parallel_size > 1:
        raise InvalidConfig(
            f"tensor_parallel_size={config.parallel.tensor_parallel_size}, but --step-times are of one worker: use "
            "--memory-bandwidth, --tflops and --memory-gib"
        )
    measured = measurement.cache
    layout = msgspec.structs.replace(measured.layout, limits=config.cache_limits)
    size, longest = config.tokens_per_block, config.scheduler.max_model_len
    in_memory = measurement.num_blocks_in_memory or measured.num_blocks
    num_blocks = config.cache.num_gpu_blocks_override
    if num_blocks is None:
        held = in_memory * measured.layout.limits.block_size // size
        num_blocks = min(held, config.scheduler.max_num_seqs * -(-longest // size) * layout.num_groups)
    if num_blocks < layout.num_blocks_for(longest):
        raise InvalidConfig(
            f"the KV cache has {num_blocks} blocks of {size} tokens, less than max_model_len={longest} needs: lower "
            "max_model_len, or give num_gpu_blocks_override"
        )
    return KVCacheConfig(num_blocks, layout)
