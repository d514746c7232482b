"""Profiles of running engines: a file for each process, with the parts of its steps by name."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest
from number_formats import DTYPE
from traces import Trace, read_trace
from waiting import eventually

from raycore import LLM, AsyncLLM, InvalidConfig, SamplingParams
from raycore.demo import demo_model_path
from raycore.errors import InvalidInput

OPTIONS = {"num_threads": 1, "max_model_len": 1000, "dtype": DTYPE, "standby_delay_s": None}
GREEDY = SamplingParams(temperature=0, max_tokens=8)
ENGINE_PARTS = {"take_commands", "step", "schedule", "execute", "wait", "update", "publish"}
WORKER_PARTS = {
    *("prepare_inputs", "forward", "embed_tokens", "norm", "lm_head", "sample"),
    *("input_layernorm", "qkv_proj", "attention", "o_proj", "post_attention_layernorm", "mlp"),
}


def settings(directory: Path) -> dict[str, object]:
    return {"profiler": "torch", "torch_profiler_dir": str(directory), "torch_profiler_with_stack": False}


def traces(directory: Path) -> dict[str, Trace]:
    """The traces that there are, by the names of their processes."""
    return {path.name.partition(".")[0]: read_trace(path) for path in directory.iterdir()}


def test_every_process_writes_the_parts_of_its_steps(ray_cluster, tmp_path: Path):
    async def run():
        options = {**OPTIONS, "tensor_parallel_size": 2}
        engine = await AsyncLLM.create(demo_model_path(), profiler_config=settings(tmp_path), **options)
        async with engine:

            async def answer() -> str:
                async for output in engine.generate("27 + 58 =", GREEDY, stream=False):
                    return output.outputs[0].text
                raise AssertionError("there was no output")

            await engine.start_profile("run")
            with pytest.raises(InvalidInput, match="a profile is running"):
                await engine.start_profile()
            assert await answer() == " 85"
            await engine.stop_profile()
            assert await answer() == " 85"

    asyncio.run(run())
    found = traces(tmp_path)
    assert set(found) == {"run_dp0_tp0", "run_dp0_tp1", "run_dp0_engine"}
    engine, worker = found["run_dp0_engine"], found["run_dp0_tp0"]
    assert engine.names >= ENGINE_PARTS
    assert worker.names & found["run_dp0_tp1"].names >= WORKER_PARTS
    num_steps = len(worker.of("forward"))
    assert num_steps >= 2
    assert len(engine.of("schedule")) >= len(engine.of("execute")) == len(engine.of("wait")) == num_steps
    # the clocks of the two are the same, but torch reads it less exactly
    assert engine.origin_ns == worker.origin_ns
    sent_us = [call["ts"] for call in engine.of("execute")]
    begun_us = [call["ts"] for call in worker.of("forward")]
    assert all(sent - 1000 < begun for sent, begun in zip(sent_us, begun_us, strict=True))


def test_a_rank_lost_during_a_profile_loses_only_its_own_profile(ray_cluster, tmp_path: Path):
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    with LLM(demo_model_path(), data_parallel_size=2, profiler_config=settings(tmp_path), **OPTIONS) as llm:
        expected = llm.generate("27 + 58 =", params, use_tqdm=False)[0].outputs[0].text
        llm.start_profile(delay_iterations=3)
        threading.Timer(0.2, os.kill, [llm.engine_infos[1].pid, signal.SIGKILL]).start()
        outputs = llm.generate(["27 + 58 ="] * 4, params, use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == [expected] * 4
        llm.stop_profile()
        names = {path.name.partition(".")[0] for path in tmp_path.iterdir() if path.stat().st_size}
        assert names == {"dp0_engine", "dp0_tp0"}
        assert read_trace(next(tmp_path.glob("dp0_tp0*"))).names >= WORKER_PARTS
        for path in tmp_path.iterdir():
            path.unlink()
        eventually(lambda: len(llm.engine_infos) == 2 and 1 in llm.clients.links(), "the lost rank hasn't come back")
        llm.start_profile("last")
        assert llm.generate("27 + 58 =", GREEDY, use_tqdm=False)[0].outputs[0].text == " 85"
    # those that run at the end are written, too
    found = traces(tmp_path)
    assert set(found) == {f"last_dp{dp}_{name}" for dp in range(2) for name in ("engine", "tp0")}
    assert any(trace.names >= WORKER_PARTS for trace in found.values())


def test_start_profile_and_stop_profile_need_the_option_profiler_config(ray_cluster, tmp_path: Path):
    with LLM(demo_model_path(), **OPTIONS) as llm:
        for act in (llm.start_profile, llm.stop_profile):
            with pytest.raises(InvalidConfig, match="option profiler_config"):
                act()
