"""What a GPU does wrong while it computes ends its rank, with the cause, and costs no request."""

from __future__ import annotations

import logging
import os
import time

import pytest
from cpu_worker import CpuWorker
from waiting import eventually

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path, held_out_problems

PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
STEP_TIMEOUT_S = 2.0


class Failed:
    """A step that the device has given up."""

    def done(self):
        return True

    def result(self, timeout=None):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Stuck:
    """A step that the device never finishes, as when a collective waits for a GPU that is gone."""

    def done(self):
        return False

    def result(self, timeout=None):
        time.sleep(60)


@pytest.fixture(scope="module", params=[1, 2], ids=lambda tp: f"tp{tp}")
def llm(request, ray_cluster):
    options = {"tensor_parallel_size": request.param, "max_model_len": 512, "num_threads": 1}
    options |= {"worker_cls": CpuWorker, "device": "cuda", "step_timeout_s": STEP_TIMEOUT_S, "standby_delay_s": None}
    with LLM(demo_model_path(), data_parallel_size=2, max_rank_restarts=50, **options) as llm:
        yield llm


@pytest.mark.parametrize(
    ("outcome", "cause"), [(Failed, "an illegal memory access"), (Stuck, "its present step has taken")]
)
def test_a_failing_device_costs_no_request(llm, caplog, outcome, cause):
    prompts = [prompt for prompt, _ in held_out_problems(2, 8)]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    broken = llm.engine_infos[0]

    # a nested function, which is pickled by value
    def break_device(worker) -> None:
        if os.getpid() != broken.worker_pids[0]:
            return
        execute, num_left = worker.execute_model, 20

        def execute_model(plan):
            nonlocal num_left
            num_left -= 1
            return execute(plan) if num_left > 0 else outcome()

        worker.execute_model = execute_model

    llm.collective_rpc(break_device)
    with caplog.at_level(logging.ERROR):
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    eventually(
        lambda: len(llm.engine_infos) == 2 and llm.engine_infos[0].pid != broken.pid, "the rank doesn't come back"
    )
    assert cause in caplog.text
