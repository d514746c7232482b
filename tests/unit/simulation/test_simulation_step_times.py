"""Step times between, on and beyond measured points, and those of a roofline."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from configs import SPEC, make_config
from msgspec.structs import replace

from raycore.cache_layout import KVCacheConfig
from raycore.errors import InvalidConfig, InvalidInput
from raycore.simulation.roofline import Device, Roofline, plain_layout
from raycore.simulation.step_times import (
    FORMAT,
    Grid,
    Line,
    MeasuredTimes,
    Measurement,
    StepShape,
    as_json,
    read_step_times,
)


def true_s(prompt: float, decodes: float, context: float) -> float:
    return 1.0 + prompt * 0.5 + decodes * (0.1 + context * 0.01) + prompt * decodes * 0.001


def measurement(**changes: object) -> Measurement:
    prompts, decodes, contexts = [0, 10, 100], [0, 2, 8], [10, 100]
    seconds: list[list[list[float | None]]] = [
        [[true_s(p, n, c) if p or n else None for c in contexts] for n in decodes] for p in prompts
    ]
    config = make_config()
    made = Measurement(
        format=FORMAT,
        model="model",
        hardware="a processor",
        versions="1",
        dtype="float32",
        options={"max_num_seqs": 8},
        max_steps_in_flight=1,
        cache=KVCacheConfig(100, plain_layout(config)),
        num_blocks_in_memory=200,
        grid=Grid(prompts, decodes, contexts, seconds),
        after_context_s=Line([0.0, 50.0], [0.0, 0.002]),
        per_prompt_s=0.25,
        engine=Line([1.0, 8.0], [0.1, 0.8]),
        engine_per_request_s=0.05,
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    "shape", [(0, 2, 10), (10, 0, 10), (10, 8, 100), (5, 1, 55), (30, 3, 20), (70, 7, 10), (3, 0, 10)]
)
def test_steps_within_the_grid_are_interpolated(shape: tuple[int, int, int]):
    prompt, decodes, context = shape
    times = MeasuredTimes(measurement())
    step = StepShape(prompt, 1 if prompt else 0, 0.0, decodes, float(context))
    assert times.step_s(step) == pytest.approx(true_s(*shape))


def test_steps_of_decodes_alone_are_the_same_one_by_one_and_together():
    times, contexts = MeasuredTimes(measurement()), np.array([5.0, 10.0, 33.3, 100.0, 400.0])
    together = times.decodes_s(3, contexts)
    alone = [times.step_s(StepShape(0, 0, 0.0, 3, float(context))) for context in contexts]
    assert together.tolist() == alone
    assert together.tolist() == pytest.approx([true_s(0, 3, context) for context in contexts])


def test_what_comes_before_a_prompt_and_further_prompts_take_time():
    times = MeasuredTimes(measurement())
    plain = times.step_s(StepShape(20, 1, 0.0, 2, 10.0))
    assert times.step_s(StepShape(20, 1, 25.0, 2, 10.0)) == pytest.approx(plain + 20 * 0.001)
    assert times.step_s(StepShape(20, 3, 0.0, 2, 10.0)) == pytest.approx(plain + 2 * 0.25)
    assert times.engine_s(4) == pytest.approx(0.4)
    assert times.engine_s(4, 2) == pytest.approx(0.5)


def test_steps_beyond_the_grid_go_on_along_lines_and_are_said_once(caplog: pytest.LogCaptureFixture):
    times = MeasuredTimes(measurement(), "steps.json")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert times.step_s(StepShape(300, 1, 0.0, 2, 10.0)) == pytest.approx(true_s(300, 2, 10))
            assert times.step_s(StepShape(0, 0, 0.0, 20, 300.0)) == pytest.approx(true_s(0, 20, 300))
    assert [record.getMessage() for record in caplog.records] == [
        "steps.json has at most 100 tokens of prompts, and a step has 300: its time is extrapolated",
        "steps.json has at most 8 decoding sequences, and a step has 20: its time is extrapolated",
        "steps.json has at most 100 tokens of a sequence, and a step has 300: its time is extrapolated",
    ]


def test_files_are_read_as_they_were_written(tmp_path: Path):
    path = tmp_path / "steps.json"
    path.write_text(as_json(measurement()))
    assert read_step_times(path).measurement == measurement()


def test_wrong_files_are_refused_by_name(tmp_path: Path):
    path = tmp_path / "steps.json"
    with pytest.raises(InvalidInput, match=r"steps.json can't be read: No such file"):
        read_step_times(path)
    path.write_text('{"format": 1}')
    with pytest.raises(InvalidInput, match=r"isn't what raycore bench step-times writes: .*missing required field"):
        read_step_times(path)
    path.write_text(as_json(measurement(format=7)))
    with pytest.raises(InvalidInput, match=r"has the format 7, and this raycore reads 1"):
        read_step_times(path)
    grid = measurement().grid
    path.write_text(as_json(measurement(grid=replace(grid, decodes=[2, 0, 8]))))
    with pytest.raises(InvalidInput, match=r"grid.decodes=\[2, 0, 8\] isn't ascending from 0"):
        read_step_times(path)
    path.write_text(as_json(measurement(grid=replace(grid, seconds=grid.seconds[1:]))))
    with pytest.raises(InvalidInput, match=r"grid.seconds doesn't have a number for each point"):
        read_step_times(path)
    holes = [[[None, None], *plane[1:]] for plane in grid.seconds]
    path.write_text(as_json(measurement(grid=replace(grid, seconds=holes))))
    with pytest.raises(InvalidInput, match=r"no time for 10 tokens of prompts, 0 decodes and a context of 10"):
        read_step_times(path)


def test_a_roofline_reads_weights_once_and_computes_each_token():
    config = make_config()
    times = Roofline(config, Device(bytes_per_s=1e9, flops_per_s=1e12, memory_bytes=1 << 20))
    attention = 32 * (4 * 16 + 4 * 8)
    weights = 2 * (attention + 3 * 32 * 64) + 128 * 32
    assert times.weight_bytes == 4 * weights
    assert times.token_bytes == 2 * 2 * 8 * 2 * 4
    # few tokens wait for memory, many for arithmetic
    assert times.step_s(StepShape(0, 0, 0.0, 2, 100.0)) == pytest.approx((4 * weights + 200 * times.token_bytes) / 1e9)
    flops = 2 * weights * 5000 + 5000 * 2500 * 4 * 4 * 8 * 2
    slow = Roofline(config, Device(bytes_per_s=1e15, flops_per_s=1e9, memory_bytes=1 << 20))
    assert slow.step_s(StepShape(5000, 1, 0.0, 0, 0.0)) == pytest.approx(flops / 1e9)
    num_bytes = (1 << 20) - times.weight_bytes
    assert times.cache(config).num_blocks == num_bytes // (16 * times.token_bytes)


def test_a_roofline_needs_room_and_a_plain_decoder():
    config = make_config()
    with pytest.raises(InvalidConfig, match=r"nothing is left for the KV cache"):
        Roofline(config, Device(1e9, 1e9, 1000)).cache(config)
    fallback = make_config(spec=replace(SPEC, implementation="transformers"))
    with pytest.raises(InvalidConfig, match=r"LlamaForCausalLM isn't a plain decoder: measure it"):
        Roofline(fallback, Device(1e9, 1e9, 1e9))
