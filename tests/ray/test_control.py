"""`raycore status` and `raycore scale`, as processes of their own, on engines that this one runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_probe import control_pid, wait_until_reachable
from fork_server import PROGRAM_PATH
from installation import ROOT, another_copy
from number_formats import DTYPE
from waiting import LONG_S, eventually

from raycore import LLM, EngineDeadError, InvalidConfig, PlacementShortage, SamplingParams, __version__
from raycore.cluster.restart_budget import RestartBudget
from raycore.control.commands import ACTOR_PREFIX, NAMESPACE
from raycore.control.remote import RemoteEngine
from raycore.demo import demo_model_path
from raycore.node.processes import is_running

USES_CONTROL = True
LIMITS = {"num_threads": 1, "max_model_len": 1000, "dtype": DTYPE, "standby_delay_s": None}
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
"""Seconds of a slow worker."""


@pytest.fixture(scope="module")
def llm(ray_cluster):
    with LLM(demo_model_path(), engine_name="demo", worker_cls="slow_worker.SlowWorker", **LIMITS) as llm:
        wait_until_reachable(llm)
        yield llm


WHOLE = ("-m", "raycore")
FORKED = ("-S", "-E", PROGRAM_PATH, str(ROOT / "raycore" / "__main__.py"))
"""The same without the seconds in which Python imports Ray. Signals don't reach it."""


def start(
    address: str, command: str, *arguments: str, program: Sequence[str] = FORKED, cwd: Path | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, command, "--address", address, *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def raycore(address: str, command: str, *arguments: str, **options: Any) -> tuple[int, str, str]:
    with start(address, command, *arguments, **options) as process:
        stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


def ranks_of(address: str, *arguments: str) -> list[dict[str, object]]:
    code, stdout, stderr = raycore(address, "status", "--json", *arguments)
    assert code == 0, stderr
    return json.loads(stdout)["ranks"]


@pytest.mark.parametrize("arguments", [("status",), ("scale", "--data-parallel-size", "2")])
def test_a_control_command_of_another_raycore_version_is_refused(llm, address, tmp_path, arguments):
    code, stdout, stderr = raycore(address, *arguments, program=WHOLE, cwd=another_copy(tmp_path, "9.9"))
    assert code == 1
    assert stdout == ""
    assert f"the driver of engine {llm.name} imported raycore {__version__} " in stderr
    assert re.search(rf"this process imported raycore 9\.9 \(sources \w+\) from {tmp_path}\.", stderr)
    assert len(llm.engine_infos) == 1


def test_raycore_status_shows_the_ranks(llm, address):
    info = llm.engine_infos[0]
    code, stdout, stderr = raycore(address, "status")
    assert code == 0, stderr
    headline, headings, row = stdout.splitlines()
    assert headline.startswith("engine demo: 1 of 1 ranks serving")
    (computation,) = info.computations
    assert dict(zip(re.split(r" {2,}", headings), re.split(r" {2,}", row), strict=True)) == {
        "rank": "dp0",
        "state": "serving",
        "node": info.node_id[:8],
        "backend": computation.backend,
        "pid": str(info.pid),
        "GPUs": "-",
        "running": "0",
        "waiting": "0",
        "KV %": "0.0",
        "restarts": "0",
    }


def test_raycore_scale_changes_the_number_of_ranks_under_load(llm, address):
    results: list[str] = []

    def call():
        outputs = llm.generate(["27 + 58 ="] * 8, LONG, use_tqdm=False)
        results.extend(output.outputs[0].finish_reason for output in outputs)

    def load():
        while not stopping.is_set():
            call()

    stopping = threading.Event()
    thread = threading.Thread(target=load)
    thread.start()
    try:
        code, stdout, stderr = raycore(address, "scale", "--data-parallel-size", "2")
        assert code == 0, stderr
        assert [line.split()[:2] for line in stdout.splitlines()[2:]] == [["dp0", "serving"], ["dp1", "serving"]]
        assert [info.dp_rank for info in llm.engine_infos] == [0, 1]

        def busy_ranks():
            ranks = RemoteEngine("demo").status()[0].ranks
            return all(rank.num_running for rank in ranks) and ranks

        # what is published may be a second old, and a new rank gets nothing before the next call
        ranks = eventually(busy_ranks)
        assert sum(rank.num_running for rank in ranks) <= 8
        assert all(0 < rank.kv_usage < 1 for rank in ranks)

        code, stdout, stderr = raycore(address, "scale", "-dp", "60")
        assert (code, stdout) == (1, "")
        assert stderr.startswith("raycore: ")
        assert "CPU" in stderr
        assert "Traceback" not in stderr
        assert [info.dp_rank for info in llm.engine_infos] == [0, 1]

        code, stdout, stderr = raycore(address, "scale", "-dp", "1", "--drain-timeout", "0.2")
        assert code == 0, stderr
        assert [line.split()[:2] for line in stdout.splitlines()[2:]] == [["dp0", "serving"]]
    finally:
        stopping.set()
        thread.join(LONG_S)
    assert results
    assert set(results) == {"length"}
    assert [rank.num_running + rank.num_waiting for rank in llm.ranks] == [0]


def test_wrong_arguments_of_control_commands_are_explained_without_a_traceback(llm, address):
    for arguments, message in (
        (("scale", "-dp", "0"), "data_parallel_size=0"),
        (
            ("status", "--name", "other"),
            f"no engine 'other' runs in the Ray cluster at {address}, but others do. Choose one:\n  raycore",
        ),
        (("status", "--address", "127.0.0.1:1"), "no Ray cluster at address '127.0.0.1:1'"),
        (("status", "--address", "local"), "'local'"),
    ):
        code, stdout, stderr = raycore(address, *arguments)
        assert (code, stdout) == (1, ""), arguments
        assert stderr.startswith("raycore: ")
        assert message in stderr
        assert "Traceback" not in stderr


def test_raycore_status_watch_shows_a_rank_that_dies_and_is_replaced(llm, address, monkeypatch):
    old_pid = llm.engine_infos[0].pid
    # what is published may be a second old, and so may what is shown of it
    monkeypatch.setattr(RestartBudget, "next_delay_s", lambda budget, *_: 3.0)
    with start(address, "status", "--watch", "--json", program=WHOLE) as watch:
        timer = threading.Timer(LONG_S, watch.kill)
        timer.start()
        seen: list[dict[str, object]] = []
        for line in watch.stdout:
            (rank,) = json.loads(line)["ranks"]
            seen.append(rank)
            if len(seen) == 2:
                os.kill(old_pid, signal.SIGKILL)
            if rank["num_restarts"] == 1 and rank["state"] == "serving":
                break
        watch.send_signal(signal.SIGINT)
        assert watch.wait(LONG_S) == 0
        timer.cancel()
    assert seen[0]["pid"] == old_pid
    assert seen[-1]["pid"] == llm.engine_infos[0].pid != old_pid
    assert any(rank["state"] == "restarting" and rank["pid"] is None for rank in seen)


def test_aborted_requests_are_not_counted_in_the_loads_of_ranks(llm):
    failure = threading.Event()

    def call():
        try:
            llm.generate(["1 + 2 ="] * 4, LONG, use_tqdm=False)
        finally:
            failure.set()

    thread = threading.Thread(target=call)
    thread.start()
    eventually(lambda: llm.ranks[0].num_running == 4, lambda: llm.ranks)
    llm.clients.abort_all()
    assert (llm.ranks[0].num_running, llm.ranks[0].num_waiting, llm.ranks[0].kv_usage) == (0, 0, 0.0)
    thread.join(LONG_S)
    assert failure.is_set()


def test_a_control_actor_that_dies_is_replaced_and_the_engine_serves_on(llm, address, monkeypatch):
    monkeypatch.setattr("raycore.control.program._RETRY_S", 0.1)
    old_pid = control_pid(llm.name)
    assert old_pid is not None
    os.kill(old_pid, signal.SIGKILL)
    eventually(lambda: control_pid(llm.name) not in (None, old_pid), "there is no other control actor")
    wait_until_reachable(llm)
    assert [rank["state"] for rank in ranks_of(address)] == ["serving"]


def test_the_status_of_several_engines_is_a_table_and_other_commands_need_a_name(llm, address):
    with LLM(demo_model_path(), **LIMITS) as other:
        wait_until_reachable(other)
        code, stdout, stderr = raycore(address, "status")
        assert code == 0, stderr
        rows = [re.split(r" {2,}", line) for line in stdout.splitlines()]
        assert rows[0][:4] == ["engine", "ranks", "model", "owner"]
        assert {row[0]: row[1] for row in rows[1:]} == dict.fromkeys(("demo", other.name), "1 of 1 ranks serving")
        assert all(f"driver (pid {os.getpid()}, node " in row[3] for row in rows[1:])
        code, stdout, stderr = raycore(address, "status", "--json")
        assert code == 0, stderr
        shown = {engine["name"]: engine for engine in json.loads(stdout)["engines"]}
        assert shown["demo"]["ranks"][0]["pid"] == llm.engine_infos[0].pid
        assert [shown[name]["owner"]["pid"] for name in ("demo", other.name)] == [os.getpid()] * 2

        os.kill(stopped := control_pid(other.name), signal.SIGSTOP)
        try:
            code, stdout, _ = raycore(address, "status")
            assert code == 1
            assert re.search(rf"^{other.name} +no answer ", stdout, re.MULTILINE)
            assert re.search(r"^demo +1 of 1 ranks serving ", stdout, re.MULTILINE)
            assert stdout.endswith(f"engine {other.name}'s control actor hasn't answered for 5 s\n")
        finally:
            os.kill(stopped, signal.SIGCONT)

        code, _, stderr = raycore(address, "scale", "-dp", "1")
        assert code == 1
        for name in ("demo", other.name):
            assert f"\n  raycore scale -dp 1 --address {address} --name {name}\n" in stderr
        assert ranks_of(address, "--name", other.name)[0]["pid"] == other.engine_infos[0].pid
        assert ranks_of(address, "--name", "demo")[0]["pid"] == llm.engine_infos[0].pid


def test_an_engine_with_a_name_in_use_is_refused_before_it_reserves_resources(llm, ray_cluster, address):
    before = ray_cluster.util.placement_group_table().keys()
    with pytest.raises(InvalidConfig, match=f"engine_name='demo' is the name of another engine in the.*{address}, of"):
        LLM(demo_model_path(), engine_name="demo", **LIMITS)
    assert ray_cluster.util.placement_group_table().keys() == before
    assert llm.generate("27 + 58 =", SamplingParams(max_tokens=1), use_tqdm=False)


def test_of_engines_that_start_together_one_gets_the_name(ray_cluster):
    started: list[LLM] = []
    errors: list[Exception] = []

    def start_one():
        try:
            started.append(LLM(demo_model_path(), engine_name="wanted", **LIMITS))
        except InvalidConfig as error:
            errors.append(error)

    threads = [threading.Thread(target=start_one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert (len(started), len(errors)) == (1, 2)
    started[0].shutdown()


def test_an_engine_name_is_free_after_a_shutdown_and_after_a_failed_start(ray_cluster):
    with pytest.raises(PlacementShortage):
        LLM(demo_model_path(), engine_name="again", data_parallel_size=99, **LIMITS)
    for _ in range(2):
        LLM(demo_model_path(), engine_name="again", **LIMITS).shutdown()


def test_raycore_status_says_that_an_engine_has_failed(ray_cluster, address):
    with LLM(demo_model_path(), engine_name="doomed", max_rank_restarts=0, **LIMITS) as doomed:
        wait_until_reachable(doomed)
        os.kill(doomed.engine_infos[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            doomed.wait_for_completion_or_failure(timeout_s=LONG_S)
        assert [rank.state for rank in doomed.ranks] == ["gone"]
        ended = (0, "", "")

        def is_told() -> bool:
            nonlocal ended
            ended = raycore(address, "status", "--name", "doomed")
            return ended[0] != 0

        eventually(is_told, "nobody is told")
        assert "0 of 1 ranks serving" in ended[1]
        assert "has failed: " in ended[2]
        code, _, stderr = raycore(address, "scale", "--name", "doomed", "-dp", "2")
        assert code == 1
        assert "died" in stderr


def test_commands_time_out_on_a_stopped_driver_and_a_killed_driver_leaves_no_engine(ray_cluster, address):
    code = f"""
import time
from raycore import LLM
from engine_probe import wait_until_reachable
llm = LLM({str(demo_model_path())!r}, engine_name="stopped", **{LIMITS!r})
wait_until_reachable(llm)
print("reachable", flush=True)
time.sleep(100)
"""
    environment = os.environ | {"RAY_ADDRESS": address}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as program:
        try:
            assert "reachable" in program.stdout.readline()
            program.send_signal(signal.SIGSTOP)
            code, _, stderr = raycore(address, "scale", "--name", "stopped", "-dp", "2")
            assert code == 1
            assert "engine stopped's driver process doesn't answer" in stderr
            code, stdout, stderr = raycore(address, "status", "--name", "stopped")
            assert code == 1
            assert "1 of 1 ranks serving" in stdout
            assert "this is the last known status" in stderr
        finally:
            program.kill()
    LLM(demo_model_path(), engine_name="stopped", **LIMITS).shutdown()
    wait_until_unlisted(ray_cluster, "stopped")


def is_listed(ray, name: str) -> bool:
    """Whether the engine has a control actor, which may still be starting."""
    return {"namespace": NAMESPACE, "name": f"{ACTOR_PREFIX}{name}"} in ray.util.list_named_actors(True)


def wait_until_unlisted(ray, name: str) -> None:
    # Ray's tables lag behind its processes
    eventually(lambda: not is_listed(ray, name), "the actor is still there")


def control_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "raycore-control"}


@pytest.mark.parametrize("moment", ["before its process is asked for", "while it starts", "when it is there"])
def test_shutdown_leaves_no_control_actor(ray_cluster, moment, monkeypatch):
    if moment == "before its process is asked for":
        monkeypatch.setattr("raycore.control.program._DELAY_S", 60.0)
    threads_before = control_threads()
    llm = LLM(demo_model_path(), engine_name="short", **LIMITS)
    assert len(control_threads() - threads_before) == 1
    pid = None
    if moment == "while it starts":
        eventually(lambda: is_listed(ray_cluster, "short"), "no process is asked for")
    elif moment == "when it is there":
        wait_until_reachable(llm)
        pid = control_pid("short")
        assert pid is not None
    llm.shutdown()
    assert llm.ranks == []
    assert control_threads() <= threads_before
    assert pid is None or not is_running(pid)
    wait_until_unlisted(ray_cluster, "short")
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.scale(2)
