"""A profile of a worker has the parts of its steps by name, and costs nothing while there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from caches import cache_of
from test_worker import checkpoint, start  # noqa: F401  # a fixture
from traces import read_trace

from raycore.errors import InvalidInput
from raycore.messages import NewRequest, StepPlan
from raycore.sampling_params import SamplingParams
from raycore.worker.worker import Worker

PARTS = {
    *("update_requests", "apply_plan", "prepare_inputs", "forward", "embed_tokens", "norm", "lm_head", "sample"),
    *("input_layernorm", "qkv_proj", "attention", "o_proj", "post_attention_layernorm", "mlp"),
}


def make_worker(checkpoint: str, tmp_path: Path, **settings: object) -> Worker:  # noqa: F811
    settings = {"torch_profiler_with_stack": False, "torch_profiler_use_gzip": False} | settings
    directory = str(tmp_path / "traces")
    worker = start(checkpoint, profiler_config={"profiler": "torch", "torch_profiler_dir": directory, **settings})
    worker.initialize_cache(cache_of(worker, 8))
    return worker


def run_steps(worker: Worker, num_steps: int, first: int = 0) -> None:
    """Run a prompt of 5 tokens, and then decodes."""
    prompt = np.arange(3, 8, dtype=np.int32)
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    request = NewRequest(0, prompt.tobytes(), 5, 0, np.arange(2, dtype=np.int32).tobytes(), params, 0)
    slot = np.int32(0).tobytes()
    for step in range(first, first + num_steps):
        is_new = step == 0
        num_tokens = np.int32(5).tobytes() if is_new else b""
        assert worker.execute_model(StepPlan(step, slot, num_tokens, new_requests=[request] if is_new else []))


def test_a_worker_profile_names_the_parts_of_a_step(checkpoint: str, tmp_path: Path):  # noqa: F811
    worker = make_worker(checkpoint, tmp_path, torch_profiler_record_shapes=True)
    worker.profile(True, "run")
    run_steps(worker, 3)
    worker.profile(False)
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name.startswith("run_dp0_tp0.")
    assert path.name.endswith(".pt.trace.json")
    trace = read_trace(path)
    assert trace.names >= PARTS
    assert trace.beginning_with("step ") == [
        "step 0: 1 requests, 5 tokens",
        "step 1: 1 requests, 1 tokens",
        "step 2: 1 requests, 1 tokens",
    ]
    assert len(trace.of("qkv_proj")) == len(trace.of("mlp")) == len(trace.of("attention")) == 3 * 2
    assert len(trace.of("forward")) == len(trace.of("sample")) == 3
    assert all(trace.lies_within(name, "forward") for name in ("attention", "qkv_proj", "mlp", "norm"))
    assert "Input Dims" in str(trace.calls)


def test_an_ended_worker_profile_restores_the_replaced_methods(checkpoint: str, tmp_path: Path):  # noqa: F811
    worker = make_worker(checkpoint, tmp_path)

    def parts() -> list[object]:
        found = [
            (id(owner), name, vars(owner).get(name)) for owner, names in worker._core.runner.parts() for name in names
        ]
        return [*found, vars(worker._core.runner).get("launch")]

    before = parts()
    worker.profile(True)
    assert parts() != before
    worker.profile(False)
    assert parts() == before
    worker.profile(False)


def test_a_worker_profile_begins_after_delay_iterations_and_ends_after_max_iterations(checkpoint: str, tmp_path: Path):  # noqa: F811
    worker = make_worker(checkpoint, tmp_path, delay_iterations=9)
    worker.profile(True, delay_iterations=1, max_iterations=2)
    run_steps(worker, 4)
    (path,) = (tmp_path / "traces").iterdir()
    steps = read_trace(path).beginning_with("step ")
    assert [name.split(":")[0] for name in steps] == ["step 1", "step 2"]
    assert "launch" not in vars(worker._core.runner)
    worker.profile(True, delay_iterations=0)  # the first has ended
    with pytest.raises(InvalidInput, match="a profile is running"):
        worker.profile(True)
    run_steps(worker, 1, first=4)
    worker.profile(False)
    assert len(list((tmp_path / "traces").iterdir())) == 2


def test_a_worker_profile_records_python_functions_on_request(checkpoint: str, tmp_path: Path):  # noqa: F811
    worker = make_worker(checkpoint, tmp_path, torch_profiler_with_stack=True, torch_profiler_with_memory=True)
    worker.profile(True)
    run_steps(worker, 1)
    worker.profile(False)
    (path,) = (tmp_path / "traces").iterdir()
    assert any("decoder.py" in name for name in read_trace(path).names)
    assert "[memory]" in path.read_text()


def test_a_running_worker_profile_is_written_at_shutdown(checkpoint: str, tmp_path: Path):  # noqa: F811
    worker = make_worker(checkpoint, tmp_path)
    worker.profile(True)
    run_steps(worker, 1)
    worker.shutdown()
    (path,) = (tmp_path / "traces").iterdir()
    assert "forward" in read_trace(path).names


def test_a_worker_profile_needs_the_option_profiler_config(checkpoint: str):  # noqa: F811
    worker = start(checkpoint)
    worker.initialize_cache(cache_of(worker, 4))
    with pytest.raises(InvalidInput, match="profiler_config"):
        worker.profile(True)
    worker.profile(False)


PROFILE_WITHOUT_STEPS = """
import sys
from raycore.config.profiler import ProfilerConfig
from raycore.worker.worker_profile import WorkerProfile

class Runner:
    def parts(self): return []
    def launch(self, plan): return None

profile = WorkerProfile("dp0_tp0", Runner())
profile.start(ProfilerConfig(profiler="torch", torch_profiler_dir=sys.argv[1]), None)
print(profile.stop())
print(*sorted({"torch._dynamo", "torch._inductor"} & set(sys.modules)))
"""


def test_steps_do_not_wait_until_torchs_compiler_is_imported(tmp_path: Path):
    run = subprocess.run(
        [sys.executable, "-c", PROFILE_WITHOUT_STEPS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.iterdir()
    assert run.stdout == f"{path}\n\n"
    assert read_trace(path).origin_ns
