"""`raycore bench step-times` and `raycore simulate`, from the command line to figures and pictures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from raycore.cli.main import main
from raycore.demo import demo_model_path
from raycore.simulation.planning import parse_grid, parse_kill
from raycore.simulation.step_times import read_step_times

ROOFLINE = ["--memory-bandwidth", "20", "--tflops", "0.5", "--memory-gib", "0.05"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": index * 2, "input_length": 40 + index, "output_length": 5 + index % 7, "hash_ids": [index % 3]}
        for index in range(40)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def simulated(capsys: pytest.CaptureFixture[str], trace: Path, *args: str) -> str:
    assert main(["simulate", "--trace", str(trace), "--model", demo_model_path(), *args]) == 0
    return capsys.readouterr().out


def test_what_is_measured_is_what_simulations_read(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.json"
    limits = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "128"]
    cache = ["--kv-cache-memory-bytes", "4M", "--num-threads", "1", "--device", "cpu"]
    args = ["bench", "step-times", "--output", str(path), "--timings", "2", "--seconds-per-point", "0.2"]
    assert main([*args, *limits, *cache, demo_model_path()]) == 0
    assert "a step of 1 decode takes" in capsys.readouterr().out
    measurement = read_step_times(path).measurement
    assert measurement.grid.prompt_tokens == [0, 16, 64]
    assert measurement.grid.decodes == [0, 1, 4]
    assert measurement.grid.seconds[0][0] == [None, None]
    assert all(second > 0 for plane in measurement.grid.seconds[1:] for row in plane for second in row if second)
    assert measurement.dtype in ("float32", "bfloat16")
    assert measurement.options["max_num_seqs"] == 4
    assert measurement.cache.num_blocks <= (measurement.num_blocks_in_memory or 0)
    (figures,) = json.loads(simulated(capsys, trace, "--step-times", str(path), *limits, "--json"))
    assert figures["completed"] == 40
    assert figures["output_tokens"] == sum(5 + index % 7 for index in range(40))
    assert figures["ttft_p50_s"] > 0


def test_figures_are_lines_of_text_or_rows_of_a_table(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = simulated(
        capsys, trace, *ROOFLINE, "--data-parallel-size", "2", "--kill", "1@0.02", "--max-model-len", "256"
    )
    assert "completed                         40" in text
    assert "rank 1 at 0.02 s was killed" in text
    assert "with failures: duration" in text
    grid = ["--grid", "max_num_seqs=2,8", "--grid", "data-parallel-size=1,2"]
    rows = simulated(capsys, trace, *ROOFLINE, "--max-model-len", "256", *grid).splitlines()
    assert rows[0].split()[:3] == ["max_num_seqs", "data_parallel_size", "tokens/s"]
    assert [row.split()[:2] for row in rows[1:]] == [["2", "1"], ["2", "2"], ["8", "1"], ["8", "2"]]


@pytest.mark.parametrize("grid", [[], ["--grid", "max_num_seqs=2,4,8"]])
def test_pictures_are_svg(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], grid: list[str]) -> None:
    picture = tmp_path / "pictures" / "plan.svg"
    simulated(capsys, trace, *ROOFLINE, "--max-model-len", "256", "--plot", str(picture), *grid)
    root = ElementTree.parse(picture).getroot()
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert names.count("circle") == (6 if grid else 0)
    assert names.count("polyline") == (0 if grid else 5)
    texts = [element.text for element in root.iter() if element.text and element.text.strip()]
    assert ("Time to the first token, p99 (s), by max_num_seqs" if grid else "Time per token (ms), by end") in texts


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give either --step-times, or --memory-bandwidth, --tflops and --memory-gib"),
        ([*ROOFLINE, "--step-times", "x"], "give either --step-times, or"),
        (["--tflops", "1"], "--memory-bandwidth is missing"),
        (["--memory-bandwidth", "-1", *ROOFLINE[2:]], "--memory-bandwidth -1 isn't positive"),
        ([*ROOFLINE, "--kill", "7@1"], "--kill 7@1: there is no rank 7 with data_parallel_size=1"),
        ([*ROOFLINE, "--kill", "soon"], "--kill 'soon' isn't RANK@SECONDS"),
        ([*ROOFLINE, "--speed", "0"], "--speed 0 isn't a positive number"),
        ([*ROOFLINE, "--plot", "x.png"], "--plot x.png: pictures are SVG"),
        ([*ROOFLINE, "--grid", "max_num_seq=1"], "unknown option 'max_num_seq'"),
        ([*ROOFLINE, "--grid", "max_num_seqs=1,x"], "--grid 'max_num_seqs=1,x': max_num_seqs='x'"),
        ([*ROOFLINE, "--pipeline-parallel-size", "2"], "simulate doesn't know pipeline_parallel_size: omit it"),
        ([*ROOFLINE, "--autoscaling", '{"max": 2}'], "--autoscaling: unknown setting 'max'"),
    ],
)
def test_mistakes_are_named(trace: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    assert main(["simulate", "--trace", str(trace), *args]) == 1
    assert message in capsys.readouterr().err


def test_grids_and_kills_are_read() -> None:
    grid: dict[str, list[Any]] = parse_grid(["max-num-seqs=64,128", "enable_prefix_caching=true,false"])
    assert grid == {"max_num_seqs": [64, 128], "enable_prefix_caching": [True, False]}
    assert parse_kill("3@600.5") == (3, 600.5)
