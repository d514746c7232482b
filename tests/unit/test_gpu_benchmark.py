"""The benchmark of the GPU path, at toy size on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import gpu
import gpu_rooflines
import gpu_timings
import pytest
import torch
from equality import FAMILIES_OF_KINDS
from gpu import checks, command, engines, layers

from raycore.checkpoint.model_spec import load_model_spec

TOY = ["--device", "cpu", "--toy"]
ARCHITECTURES = ("llama3", "mixtral", "gemma3", "gpt_oss")
LAYERS = ("deepseek_v3", "qwen3_next")
"""Some of the families. Other tests compare all of them with transformers on CPUs."""
WITHOUT_RAY = f"""
import sys
sys.modules["ray"] = None
sys.path.insert(0, {str(Path(gpu.__file__).parents[1])!r})
from gpu import command
command.architectures.FAMILIES = {ARCHITECTURES!r}
for family in command.layers.NUM_BLOCKS.keys() - {LAYERS!r}:
    del command.CHECKS[f"layers of {{family}}"]
sys.exit(command.main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _process_is_left_as_it_was() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    with mock.patch.dict(os.environ):
        yield
    torch.set_num_threads(num_threads)


@pytest.mark.timeout(900)  # it takes half a minute on a machine that does nothing else
def test_the_gpu_benchmark_prints_checks_and_rooflines_for_toy_models(tmp_path: Path) -> None:
    out = tmp_path / "results" / "gpu.md"
    # so many seconds that no part is skipped, however busy the machine is
    command = [sys.executable, "-c", WITHOUT_RAY, *TOY, "--seconds", "9999", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert out.read_text().splitlines() == lines
    assert lines[0].startswith("# GPU path, ")
    assert sum(line.startswith("ok ") for line in lines) >= 65
    assert not [line for line in lines if line.startswith("FAILED")]
    assert [line for line in lines if line.startswith("skipped")] == [
        *(f"skipped {part}: needs a GPU" for part in ("kernels", "latents", "states")),
        "skipped no synchronization in steady decodes: needs a GPU",
        *(f"skipped {each}, blocks from the host, fp8: needs a GPU" for each in ("qwen3", "mistral")),
        "skipped qwen3, weights in place, fp8: needs a GPU",
        "skipped no synchronization in steps that pool: needs a GPU",
        *(f"skipped {each}, no synchronization in steady decodes: needs a GPU" for each in LAYERS),
    ]
    scale, cells = gpu_timings.TOY, [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    for model in gpu_rooflines.MODELS:
        steps = [("decode", batch, context) for context in scale.contexts for batch in scale.batches]
        steps += [("prompt", 1, num_tokens) for num_tokens in scale.prompts]
        rows = [row for row in cells if row[0] == model and row[1] in ("decode", "prompt")]
        assert [tuple(row[1:4]) for row in rows] == [tuple(map(str, step)) for step in steps]
        assert all(float(row[4]) > 0 and row[6].endswith("%") and float(row[7]) > 0 for row in rows)
        assert json.loads((out.parent / f"gpu_{model}_trace.json").read_text())["traceEvents"]


def test_layers_of_each_kind_are_checked_on_gpus() -> None:
    of_architectures = {"gpt_oss"}
    assert set(FAMILIES_OF_KINDS) - layers.NUM_BLOCKS.keys() == of_architectures


def test_a_wrong_token_fails_the_gpu_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = checks.generate

    def generate_wrongly(core, asked: Sequence) -> list[engines.Answer]:
        answers = generate(core, asked)
        if core.config.model.batch_invariant and core.config.scheduler.max_num_batched_tokens == 16:
            answers[2].token_ids[-1] ^= 1
        return answers

    monkeypatch.setattr(checks, "generate", generate_wrongly)
    monkeypatch.setattr(command, "CHECKS", {name: command.CHECKS[name] for name in ("invariance", "graphs")})
    assert command.main([*TOY, "--models", ""]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAILED ")]
    assert len(failed) == 3
    expected = "batch_invariant, same bits: 18468 logits; others than alone in chunks: request 2 has tokens ["
    assert all(expected in line for line in failed)
    assert lines[-2] == "FAILED: invariance"
    assert any("graphs as eager" in line for line in lines if line.startswith("ok ")), "later checks still run"


def test_an_error_in_a_check_fails_the_gpu_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = checks.Checks(print, "cpu", tmp_path)
    made.run("divides", lambda: (1 // 0 == 0, ""))
    assert made.num_failed == 1
    assert capsys.readouterr().out.startswith("FAILED divides: ZeroDivisionError: ")


def test_parts_of_the_gpu_benchmark_that_exceed_the_time_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*TOY, "--seconds", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.startswith(("ok ", "FAILED"))]
    assert [line for line in lines if line.startswith("skipped ") and ", " not in line] == [
        *(f"skipped {part}: needs a GPU" for part in ("kernels", "latents", "states")),
        "skipped no synchronization in steady decodes: needs a GPU",
        "skipped no synchronization in steps that pool: needs a GPU",
        *(f"skipped {model}: out of time" for model in ("minilm6", "bert_base", "modernbert_base", "0.6b", "8b")),
        *(f"skipped {model}: out of time" for model in ("Qwen2.5-VL-3B", "Qwen3-VL-4B", "Gemma 3 4B")),
        *(f"skipped {model}: out of time" for model in gpu_rooflines.MODELS),
    ]


def test_parts_of_the_gpu_benchmark_run_in_processes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "CHECKS", {})
    monkeypatch.setattr(command, "MEASUREMENTS", ())
    monkeypatch.setattr(command, "GRACE_S", 1.0)
    assert command.main([*TOY, "--isolated", "--models", "0.6b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("# GPU path, ")
    assert len([line for line in lines if line.startswith("| 0.6b |")]) == 6


def test_a_part_of_the_gpu_benchmark_that_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "CHECKS", {})
    assert command.main([*TOY, "--isolated", "--models", "", "--seconds", "0.1"]) == 1
    assert "FAILED versions: the process was killed at its deadline" in capsys.readouterr().out


def test_the_gpu_benchmark_refuses_an_unknown_model() -> None:
    with pytest.raises(SystemExit, match=r"--models 7b: choose from 0\.6b,8b,30b-a3b"):
        command.main([*TOY, "--models", "0.6b,7b"])


@pytest.mark.parametrize(
    ("model", "billions", "active"), [("0.6b", 0.60, 0.60), ("8b", 8.19, 7.57), ("30b-a3b", 30.53, 3.04)]
)
def test_the_bytes_and_flops_of_benchmark_models_are_those_of_their_cards(
    tmp_path: Path, model: str, billions: float, active: float
) -> None:
    """Sizes on the models' cards. A decode reads the head, but only some rows of the embeddings."""
    (tmp_path / "config.json").write_text(json.dumps(gpu_rooflines.MODELS[model]))
    spec = load_model_spec(tmp_path)
    assert gpu_rooflines.model_bytes(spec) / 2e9 == pytest.approx(billions, rel=0.01)
    assert gpu_rooflines.decode_bytes(spec, 1, 0) / 2e9 == pytest.approx(active, rel=0.01)
    assert gpu_rooflines.prompt_flops(spec, 1) == pytest.approx(2e9 * active, rel=0.01)


def test_large_gaps_between_kernels_are_found() -> None:
    starts_us = {"first": 0.0, "second": 11.0, "late": 60.0}
    events = [{"cat": "kernel", "name": name, "ts": start, "dur": 10.0} for name, start in starts_us.items()]
    events.append({"cat": "cpu_op", "name": "launch", "ts": 0.0, "dur": 99.0})
    lines = gpu_timings.profile_lines(events, "cuda", 1, 64, 512)
    assert [line.split(" | ")[0] for line in lines if line.startswith("| `")] == [f"| `{name}`" for name in starts_us]
    assert lines[-1] == "\nidle 57.1% of the time; gaps above 20 µs: 1: 39 µs before `late`"
