"""Ranks die while requests run: every request finishes with what it would have given, or fails alone and says why."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from engine_probe import standby_pids
from faults import raise_in_step, signal_in_step
from number_formats import BATCH_INVARIANT, DTYPE
from waiting import LONG_S, eventually

from raycore import (
    LLM,
    AsyncLLM,
    EngineDeadError,
    PlacementShortage,
    RequestFailed,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from raycore.demo import demo_model_path, held_out_problems
from raycore.node.processes import is_running
from raycore.sampling.logits_processors import AdapterLogitsProcessor
from raycore.worker.worker import Worker

LIMITS = {"num_threads": 1, "max_model_len": 512, "dtype": DTYPE}
POISON = 77
"""A token that no other prompt here has."""


class PoisonedWorker(Worker):
    """Dies of one token."""

    def execute_model(self, plan):
        for request in plan.new_requests:
            if POISON in np.frombuffer(request.token_ids, np.int32):
                print("this token is poison", file=sys.stderr)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().execute_model(plan)


def mixed_requests() -> tuple[list[str], list[SamplingParams]]:
    """Greedy and seeded; some with log probabilities, stop strings, several outputs, or held to a pattern."""
    prompts = [prompt for prompt, _ in held_out_problems(2, 14)]
    long = {"max_tokens": 80, "ignore_eos": True}
    kinds = [
        {"temperature": 0, "return_hidden_states": True, "return_prompt_hidden_states": True},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 7, "n": 2, "logprobs": 1},
        {"temperature": 1.0, "seed": 8, "stop": ["7 7", "99", "\n5"]},
        {"temperature": 1.0, "seed": 9, "structured_outputs": StructuredOutputsParams(regex="([a-z]{2,9} ){40}")},
        {"temperature": 1.0, "seed": 10, "structured_outputs": StructuredOutputsParams(json_object=True, after="7")},
        {"temperature": 1.0, "seed": 11, "logprobs": 1, "extra_args": {"no_repeats": 2}},
    ]
    return prompts, [SamplingParams(**long, **kinds[i % len(kinds)]) for i in range(len(prompts))]


def wait_for_ranks(llm, num_ranks: int) -> None:
    eventually(lambda: min(len(llm.engine_infos), len(llm.clients.links())) >= num_ranks, "the rank doesn't come back")


def wait_for_other(llm, dp_rank: int, old_pid: int) -> None:
    def is_back() -> bool:
        info = next((info for info in llm.engine_infos if info.dp_rank == dp_rank), None)
        return info is not None and info.pid != old_pid and dp_rank in llm.clients.links()

    eventually(is_back, "the rank doesn't come back")


FAULTS = {"step_timeout_s": 4.0, "max_rank_restarts": 50, "max_request_replays": 50}
"""Stopped workers are noticed soon. Where the machine is so busy that others' steps take as long, no request fails."""


@pytest.fixture(scope="module")
def llm(ray_cluster):
    options = {"data_parallel_size": 2, "tensor_parallel_size": 2, **FAULTS}
    with LLM(demo_model_path(), batch_invariant=True, **options, **LIMITS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    return llm.generate(*mixed_requests(), use_tqdm=False)


# test_failures_of_each_pipeline_stage_change_no_result kills a worker, and in test_supervisor.py an engine stands still
@pytest.mark.parametrize(("victim", "number"), [("engine", signal.SIGKILL), ("worker", signal.SIGSTOP)])
def test_a_killed_engine_or_worker_process_changes_no_result(llm, expected, victim, number):
    wait_for_ranks(llm, 2)
    info = llm.engine_infos[1]
    signal_in_step(llm, 1, info.pid if victim == "engine" else info.worker_pids[1], 40, number)
    outputs = llm.generate(*mixed_requests(), use_tqdm=False)
    for output, reference in zip(outputs, expected, strict=True):
        assert output.outputs == reference.outputs
        assert output.prompt_logprobs == reference.prompt_logprobs
        assert_equal_states(output, reference)
    wait_for_ranks(llm, 2)
    assert llm.engine_infos[1].pid != info.pid


def assert_equal_states(output: RequestOutput, reference: RequestOutput) -> None:
    """Assert that two outputs, one of which has moved to another rank, have the same bits in their hidden states."""
    assert np.array_equal(output.prompt_hidden_states, reference.prompt_hidden_states)
    for completion, expected in zip(output.outputs, reference.outputs, strict=True):
        assert np.array_equal(completion.hidden_states, expected.hidden_states)


def test_an_exception_in_a_step_costs_no_request(llm, expected):
    wait_for_ranks(llm, 2)
    before = llm.engine_infos[0].pid
    raise_in_step(llm, dp_rank=0, num_steps=40)
    outputs = llm.generate(*mixed_requests(), use_tqdm=False)
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    wait_for_ranks(llm, 2)
    assert llm.engine_infos[0].pid != before


class NoRepeats(AdapterLogitsProcessor):
    """Forbids the last tokens of the output, as many as a request's `extra_args` say."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        count = (params.extra_args or {}).get("no_repeats")

        def forbid(output_ids, logits):
            logits[output_ids[-count:]] = -np.inf
            return logits

        return None if count is None else forbid


def test_failures_of_each_pipeline_stage_change_no_result(ray_cluster):
    """A worker of the first stage dies, and one of the last stands still."""
    options = {"pipeline_parallel_size": 2, **FAULTS}
    with LLM(demo_model_path(), batch_invariant=True, logits_processors=[NoRepeats], **options, **LIMITS) as llm:
        with ThreadPoolExecutor(1) as pool:
            generating = pool.submit(llm.generate, *mixed_requests(), use_tqdm=False)
            while not generating.done():  # calls come between steps in flight
                assert llm.collective_rpc(lambda worker: worker.rank.pp_rank) == [0, 1]
        expected = [output.outputs for output in generating.result()]
        for stage, number in ((0, signal.SIGKILL), (1, signal.SIGSTOP)):
            info = llm.engine_infos[0]
            signal_in_step(llm, 0, info.worker_pids[stage], 40, number)
            assert [output.outputs for output in llm.generate(*mixed_requests(), use_tqdm=False)] == expected
            wait_for_other(llm, 0, info.pid)
        repeat = {params.extra_args is not None: set[bool]() for params in mixed_requests()[1]}
        for (completion, *_), params in zip(expected, mixed_requests()[1], strict=True):
            ids = completion.token_ids
            has_repeats = any(token_id in ids[max(0, i - 2) : i] for i, token_id in enumerate(ids))
            repeat[params.extra_args is not None].add(has_repeats)
        assert repeat[True] == {False}
        assert True in repeat[False]


def test_a_request_that_cannot_be_decoded_fails_alone(llm, monkeypatch):
    wait_for_ranks(llm, 2)
    pids = [info.pid for info in llm.engine_infos]
    for module in ("inputs", "request_checks"):
        monkeypatch.setattr(f"raycore.client.{module}.checked_int", lambda name, value: value)
    params = SamplingParams(temperature=0, max_tokens=8)
    with pytest.raises(RequestFailed, match="Expected `int`, got `float`") as failure:
        llm.generate(["27 + 58 ="] * 4, params, use_tqdm=False, priority=[0, 1.5, 0, 0])
    assert [output and output.outputs[0].text for output in failure.value.outputs] == [" 85", None, " 85", " 85"]
    llm.check_health()
    assert [info.pid for info in llm.engine_infos] == pids


def test_a_pause_of_each_mode(llm, expected):
    wait_for_ranks(llm, 2)
    prompts, params = mixed_requests()
    with ThreadPoolExecutor() as pool:
        for mode in ("wait", "keep", "abort"):
            results = start_requests(llm, pool)
            llm.pause_generation(mode=mode)
            assert llm.is_paused()
            assert llm.num_unfinished_requests == (len(prompts) if mode == "keep" else 0)
            num_tokens = llm._client.num_output_tokens
            late = pool.submit(llm.generate, prompts[:1], params[:1], use_tqdm=False)
            time.sleep(0.1)
            assert llm._client.num_output_tokens == num_tokens
            assert {rank.state for rank in llm.ranks} == {"paused"}
            llm.resume_generation()
            assert late.result(LONG_S)[0].outputs == expected[0].outputs
            outputs = [output.outputs for output in results.result(LONG_S)]
            if mode != "abort":
                assert outputs == [output.outputs for output in expected]
                continue
            assert any(part.finish_reason == "abort" for parts in outputs for part in parts)
            for parts, reference in zip(outputs, expected, strict=True):
                for part, whole in zip(parts, reference.outputs, strict=True):
                    assert part.token_ids == whole.token_ids[: len(part.token_ids)]


# tests/simulation kills and stops processes at every moment of pauses and sleeps
@pytest.mark.parametrize(
    ("level", "victim", "number", "when"),
    [
        (1, "worker", signal.SIGSTOP, "before"),
        (2, "engine", signal.SIGKILL, "asleep"),
        (2, "worker", signal.SIGKILL, "waking"),
    ],
)
def test_a_rank_that_dies_in_a_pause_is_replaced_by_a_paused_one(llm, expected, level, victim, number, when):
    wait_for_ranks(llm, 2)
    before = llm.engine_infos[1]
    pid = before.pid if victim == "engine" else before.worker_pids[1]
    with ThreadPoolExecutor() as pool:
        results = start_requests(llm, pool)
        if when == "before":
            os.kill(pid, number)
        llm.sleep(level, mode="keep")
        num_tokens = llm._client.num_output_tokens
        if when == "asleep":
            os.kill(pid, number)
        if when != "waking":
            wait_for_other(llm, 1, before.pid)
            # the other rank may have been taken for stuck, too
            eventually(
                lambda: {rank.state for rank in llm.ranks} == {"asleep" if level else "paused"}, lambda: llm.ranks
            )
        else:
            os.kill(pid, number)
        assert llm._client.num_output_tokens == num_tokens
        assert llm.wake_up()
        assert [output.outputs for output in results.result(LONG_S)] == [output.outputs for output in expected]
    wait_for_other(llm, 1, before.pid)
    assert {rank.state for rank in llm.ranks} == {"serving"}


def start_requests(llm, pool: ThreadPoolExecutor):
    """Submit the mixed requests, and wait until tokens come. Returns the future of the outputs."""
    num_tokens = llm._client.num_output_tokens
    results = pool.submit(llm.generate, *mixed_requests(), use_tqdm=False)
    eventually(lambda: llm._client.num_output_tokens != num_tokens, "no token comes")
    return results


def test_the_workers_of_a_replaced_rank_freeze_loaded_objects_out_of_garbage_collection(llm):
    wait_for_ranks(llm, 2)
    assert min(llm.collective_rpc(lambda worker: __import__("gc").get_freeze_count())) > 10_000


@pytest.mark.parametrize("mode", BATCH_INVARIANT)
def test_a_stream_continues_after_the_death_of_the_only_rank(ray_cluster, mode):
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)

    async def scenario():
        async with AsyncLLM(demo_model_path(), **LIMITS | mode) as llm:
            whole = [output async for output in llm.generate("27 + 58 =", params)][-1]
            lengths = []
            async for output in llm.generate("27 + 58 =", params):
                lengths.append(len(output.outputs[0].token_ids))
                if len(lengths) == 20:
                    os.kill(llm.engine_infos[0].pid, signal.SIGKILL)
            assert output.outputs == whole.outputs
            assert lengths == sorted(set(lengths)), "nothing comes twice or goes back"

    asyncio.run(scenario())


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_standby_takes_the_place_of_a_dead_rank(ray_cluster):
    options = {"data_parallel_size": 2, "executor_backend": "ray", "standby_delay_s": 0.0}
    with LLM(demo_model_path(), **options, **LIMITS) as llm:
        for _ in range(2):
            waiting = eventually(lambda: standby_pids(llm), "there is no standby")
            # they say that they are ready, and are stopped then
            eventually(lambda pids=waiting: all(is_stopped(pid) for pid in pids), "a standby isn't stopped")
            os.kill(llm.engine_infos[1].pid, signal.SIGKILL)
            wait_for_other(llm, 1, llm.engine_infos[1].pid)
            info = llm.engine_infos[1]
            assert {info.pid, *info.worker_pids} == set(waiting)
            outputs = llm.generate(["27 + 58 ="] * 8, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
            assert [output.outputs[0].text for output in outputs] == [" 85"] * 8
    assert not [pid for pid in waiting if is_running(pid)]


def test_a_request_that_kills_ranks_fails_alone(ray_cluster):
    options = {"data_parallel_size": 2, "worker_cls": PoisonedWorker, "max_request_replays": 1, "max_num_seqs": 4}
    with LLM(demo_model_path(), **options, **LIMITS) as llm:
        prompts = [[5, 6, 7 + i] for i in range(8)]
        params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        # it alone: what runs beside it would be on its failing ranks, too
        with pytest.raises(RequestFailed, match="2 ranks failed while they had it") as failure:
            llm.generate([[5, POISON]], params, use_tqdm=False)
        assert list(failure.value.outputs) == [None]
        assert "SIGKILL" in str(failure.value) or "was killed" in str(failure.value)
        assert "    this token is poison" in str(failure.value).splitlines()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [100] * 8


def test_without_restarts_the_death_of_the_only_rank_fails_every_caller_at_once(ray_cluster):
    with LLM(demo_model_path(), max_rank_restarts=0, **LIMITS) as llm:
        pid = llm.engine_infos[0].pid
        errors: list[BaseException] = []

        def call():
            try:
                llm.generate(["1 + 2 ="] * 64, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
            except BaseException as error:
                errors.append(error)

        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        eventually(lambda: llm._client.num_unfinished_requests == 3 * 64)
        os.kill(pid, signal.SIGKILL)
        for caller in callers:
            caller.join(LONG_S)
        assert len(errors) == 3
        for error in errors:
            assert isinstance(error, EngineDeadError)
            assert str(pid) in str(error).splitlines()[0]
        with pytest.raises(EngineDeadError):
            llm.generate("1 + 2 =", use_tqdm=False)
        with pytest.raises(EngineDeadError, match=str(pid)):
            llm.wait_for_completion_or_failure(timeout_s=1.0)


def test_the_error_of_a_dead_worker_shows_its_last_lines(ray_cluster):
    with LLM(demo_model_path(), tensor_parallel_size=2, max_rank_restarts=0, **LIMITS) as llm:
        llm.collective_rpc(_complain)
        pid = llm.engine_infos[0].worker_pids[1]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError) as caught:
            llm.wait_for_completion_or_failure(timeout_s=LONG_S)
    _, shown, lines = str(caught.value).partition(f"The last lines of process {pid}:\n")
    assert shown
    assert f"    process {pid} runs out of patience" in lines.splitlines()
    assert lines.count("runs out of patience") == 1, "the other worker's log isn't shown"


def _complain(worker):
    print(f"process {os.getpid()} runs out of patience", file=sys.stderr)


def test_scaling_under_load_loses_no_request(ray_cluster):
    with LLM(demo_model_path(), batch_invariant=True, **LIMITS) as llm:
        prompts, params = mixed_requests()
        expected = llm.generate(prompts, params, use_tqdm=False)
        results: list[list] = []
        stopping = threading.Event()

        def load():
            while not stopping.is_set():
                results.append(llm.generate(prompts, params, use_tqdm=False))

        thread = threading.Thread(target=load)
        thread.start()
        try:
            llm.scale(3)
            assert [info.dp_rank for info in llm.engine_infos] == [0, 1, 2]
            assert llm.collective_rpc("dtype_name") == [DTYPE] * 3
            with pytest.raises(PlacementShortage, match="CPU"):
                llm.scale(60)
            llm.scale(1, drain_timeout_s=0.3)
            assert [info.dp_rank for info in llm.engine_infos] == [0]
        finally:
            stopping.set()
            thread.join(LONG_S)
        assert results
        for outputs in results:
            assert [output.outputs for output in outputs] == [output.outputs for output in expected]
