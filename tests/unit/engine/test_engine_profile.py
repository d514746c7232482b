"""A profile of an engine has the parts of its steps, on a clock that others have, too."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from configs import make_config
from fake_executor import FakeExecutor, request
from traces import Trace, read_trace

from raycore.config.profiler import ProfilerConfig
from raycore.engine.core import EngineCore
from raycore.engine.loop import run_loop
from raycore.engine.mailbox import Mailbox, Submit, Utility
from raycore.errors import InvalidInput, WorkerFailed
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams


def make_core(tmp_path: Path, depth: int = 1) -> EngineCore:
    config = msgspec.structs.replace(make_config(), profiler_config=ProfilerConfig(str(tmp_path)))
    return EngineCore(config, FakeExecutor(max_concurrent_batches=depth), name="dp3_engine")


def switch(core: EngineCore, *args: Any, **kwargs: Any) -> None:
    core.utilities.functions["profile"](*args, **kwargs)


def only_trace(tmp_path: Path) -> Trace:
    (path,) = tmp_path.iterdir()
    return read_trace(path)


def run_steps(core: EngineCore, num_steps: int) -> None:
    core.submit(request(0, max_tokens=num_steps))
    while core.has_work():
        core.step()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_profile_has_the_parts_of_each_step(tmp_path: Path, depth: int):
    core = make_core(tmp_path, depth)
    before_ns = time.time_ns()
    switch(core, True, "run")
    run_steps(core, 5)
    switch(core, False)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("run_dp3_engine.")
    trace = read_trace(path)
    assert trace.names == {"step", "schedule", "execute", "wait", "update"}
    assert all(len(trace.of(name)) >= 5 for name in trace.names)
    assert len(trace.of("wait")) == len(trace.of("execute")) == len(trace.of("update"))
    assert all(trace.lies_within(name, "step") for name in trace.names)
    assert before_ns < trace.origin_ns + trace.calls[0]["ts"] * 1000 < time.time_ns()


def test_an_ended_engine_profile_restores_the_replaced_methods(tmp_path: Path):
    core = make_core(tmp_path)
    objects = [core, core.scheduler, core.executor]
    before = [set(vars(each)) for each in objects]
    switch(core, True)
    assert [set(vars(each)) for each in objects] != before
    switch(core, False)
    assert [set(vars(each)) for each in objects] == before
    switch(core, True, max_iterations=2)
    run_steps(core, 5)
    assert [set(vars(each)) for each in objects] == before


def test_an_engine_profile_of_the_loop_has_the_calls_of_the_mailbox(tmp_path: Path):
    core, mailbox = make_core(tmp_path), Mailbox()
    core.profile.add(mailbox, take="take_commands", publish="publish")
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    mailbox.put(Utility("profile", (True,), {}))
    mailbox.put(Submit([EngineRequest(0, "a", [1, 2, 3], params, seed=0)]))
    take = core.step

    def step_and_stop():
        outputs = take()
        if outputs is not None and outputs.finished:
            mailbox.put(Utility("profile", (False,), {}))
            mailbox.stop()
        return outputs

    core.step = step_and_stop
    run_loop(core, mailbox)
    core.shutdown()
    trace = only_trace(tmp_path)
    assert {"step", "schedule", "execute", "wait", "update", "publish"} <= trace.names


def test_an_engine_profile_begins_after_delay_iterations_and_ends_after_max_iterations(tmp_path: Path):
    core = make_core(tmp_path)
    switch(core, True, delay_iterations=2, max_iterations=3)
    run_steps(core, 10)
    trace = only_trace(tmp_path)
    assert len(trace.of("execute")) == 3
    switch(core, False)  # it has ended by itself
    switch(core, True)
    switch(core, False)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_profile_that_never_began_leaves_no_file(tmp_path: Path):
    core = make_core(tmp_path)
    switch(core, True, delay_iterations=100)
    run_steps(core, 3)
    switch(core, False)
    assert not list(tmp_path.iterdir())


def test_a_second_engine_profile_is_refused_while_one_is_running(tmp_path: Path):
    core = make_core(tmp_path)
    switch(core, True)
    with pytest.raises(InvalidInput, match="a profile is running"):
        switch(core, True)
    run_steps(core, 2)
    switch(core, False)
    assert only_trace(tmp_path).names


def test_a_profile_that_no_worker_can_start_is_not_started(tmp_path: Path):
    core = make_core(tmp_path)
    asked = []

    def refuse(method, timeout=None, args=(), kwargs=None):
        asked.append(args[0])
        raise WorkerFailed(1, "OSError: the disk is full", "")

    core.executor.collective_rpc = refuse
    with pytest.raises(WorkerFailed, match="the disk is full"):
        switch(core, True)
    assert asked == [True, False]
    assert not core.profile.is_open


def test_a_running_profile_is_written_at_shutdown(tmp_path: Path):
    core = make_core(tmp_path)
    switch(core, True)
    run_steps(core, 2)
    core.shutdown()
    assert "schedule" in only_trace(tmp_path).names


def test_a_profile_file_that_cannot_be_written_fails_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    core = make_core(tmp_path)
    switch(core, True, max_iterations=2)
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.mkdir()
    run_steps(core, 6)
    assert "failed" in caplog.text
    switch(core, False)


def test_an_engine_profile_has_the_same_parts_in_lockstep(tmp_path: Path):
    core = make_core(tmp_path)
    core.submit(request(0, max_tokens=2))
    switch(core, True)
    while core.has_work():
        core.lockstep_step()
    switch(core, False)
    trace = only_trace(tmp_path)
    assert trace.names == {"step", "schedule", "execute", "wait", "update"}
    assert len(trace.of("step")) == len(trace.of("update")) == 2


def test_an_engine_profile_that_cannot_replace_a_method_restores_the_others(tmp_path: Path):
    class Fixed:
        __slots__ = ()

        def compute(self) -> None: ...

    core = make_core(tmp_path)
    core.profile.add(Fixed(), compute="compute")
    with pytest.raises((AttributeError, TypeError)):
        switch(core, True)
    assert not core.profile.is_open
    assert not list(tmp_path.iterdir())
    assert "schedule" not in vars(core.scheduler)
    assert "execute" not in vars(core.executor)
