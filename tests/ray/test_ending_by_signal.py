"""What a program with an engine does when a signal ends it, and what it leaves: nothing."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import shared_memory
from fake_ranks import free_resources, has_free
from programs import START_S, Program, raycore
from ray._private.state import state
from ray.util.placement_group import placement_group_table
from waiting import eventually

from raycore.node.processes import send_signal, wait_until_gone

pytestmark = pytest.mark.timeout(400)

DRAIN_S = 2.0
GRACE_S = 2.0
"""What ending takes beyond the time that requests get."""

SLACK_S = 40.0
"""For a machine that does much else. What hangs takes 45 seconds or more."""

LIMITS = ("--dtype", "float32", "--max-model-len", "256", "--num-threads", "1")

PLAIN = """
import atexit, time
atexit.register(time.sleep, 4.0)  # runs last

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path

if __name__ == "__main__":
    llm = LLM(str(demo_model_path()), dtype="float32", num_threads=1, use_tqdm_on_load=False)
    print("is up", flush=True)
    while True:
        llm.generate(["27 + 58 ="] * 8, SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
"""


@pytest.fixture(autouse=True)
def _nothing_stays_in_shared_memory() -> Iterator[None]:
    with shared_memory.nothing_stays():
        yield


@pytest.fixture
def joined(address) -> dict[str, str]:
    """The environment of a program that joins the tests' cluster, where that makes no difference: it starts sooner."""
    return {"RAY_ADDRESS": address}


def serve(*options: str, **settings: object) -> Program:
    command = raycore("serve", "--port", "0", "--shutdown-timeout", f"{DRAIN_S:g}", *LIMITS, *options)
    return Program(command, **settings)  # pyright: ignore[reportArgumentType]


def batch(tmp_path: Path, num_lines: int, environment: dict[str, str]) -> Program:
    requests = tmp_path / "in.jsonl"
    body = {"prompt": "27 + 58 =", "max_tokens": 60, "ignore_eos": True}
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(num_lines)]
    requests.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    files = ("-i", str(requests), "-o", str(tmp_path / "out.jsonl"))
    command = raycore("run-batch", *files, "--shutdown-timeout", "1", "--no-progress", *LIMITS)
    return Program(command, environment=environment)


def send_to_each(program: Program, number: int) -> None:
    """As a service manager does, to every process of a service."""
    send_signal(program.living(), number)


def send_to_group(program: Program, number: int) -> None:
    os.killpg(program.process.pid, number)


def assert_ends(program: Program, status: int, *, drain_s: float = 0.0) -> None:
    """Soon, with nothing left, and without work for the processor."""
    program.living()
    cpu_before_s = program.cpu_s
    limit_s = drain_s + GRACE_S + SLACK_S
    started_s = time.monotonic()
    assert program.wait_for_exit(limit_s) == status, program.output
    took_s = time.monotonic() - started_s
    program.wait_until_nothing_is_left(SLACK_S)
    if not drain_s:
        assert program.cpu_s - cpu_before_s < 10.0, f"{program.cpu_s - cpu_before_s:.1f} CPU seconds in {took_s:.1f} s"
    print(f"ended in {took_s:.2f} s, {program.cpu_s - cpu_before_s:.2f} CPU seconds")


@contextmanager
def streaming(program: Program, num_prompts: int) -> Generator[Iterator[str], None, None]:
    """The events of an answer that has begun. A prompt takes a second or more."""
    program.wait_for("serving")
    url = next(word for word in program.output.split() if word.startswith("http://"))
    body = {"prompt": ["1 + 2 ="] * num_prompts, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=START_S) as answer:
        events = (line for line in answer.iter_lines() if line)
        assert "finish_reason" in next(events)
        yield events


def finish_reasons(events: Iterator[str]) -> Counter[str]:
    """How the choices of an answer end, which has to end properly."""
    *lines, end = events
    assert end == "data: [DONE]"
    choices = [choice for line in lines for choice in json.loads(line.removeprefix("data: "))["choices"]]
    return Counter(choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None)


def test_a_server_finishes_its_requests_although_its_whole_group_was_signalled():
    with serve("--max-num-seqs", "1", "--shutdown-timeout", f"{START_S:g}") as program:
        with streaming(program, 2) as events:
            send_to_each(program, signal.SIGHUP)
            send_to_group(program, signal.SIGHUP)  # an echo
            assert finish_reasons(events) == {"length": 2}
        assert_ends(program, 0)
        assert program.output.endswith("raycore: ended by SIGHUP: all requests finished or were aborted\n")


def test_a_signalled_server_aborts_requests_that_outlast_the_shutdown_timeout():
    with serve("-tp", "2", "--max-num-seqs", "1") as program, streaming(program, 100) as events:
        reasons: Counter[str] = Counter()
        reader = threading.Thread(target=lambda: reasons.update(finish_reasons(events)))
        reader.start()
        send_to_group(program, signal.SIGTERM)
        assert_ends(program, 0, drain_s=DRAIN_S)
        reader.join(SLACK_S)
        assert reasons["abort"]
        assert program.output.endswith("raycore: ended by SIGTERM: all requests finished or were aborted\n")


def test_a_server_under_timeout_does_not_wait_for_a_client_that_does_not_read(joined):
    """The server gets the signal twice: `timeout` sends it to its child and then to the group. More than the sockets'
    buffers hold is left to be sent.
    """
    command = raycore("serve", "--port", "0", "--shutdown-timeout", f"{DRAIN_S:g}", "--max-num-seqs", "64", *LIMITS)
    command = ["timeout", "-s", "TERM", "1000", *command]
    with Program(command, environment=joined) as program, streaming(program, 1_000):
        program.process.send_signal(signal.SIGALRM)  # which is how `timeout` knows that the time is over
        assert_ends(program, 124, drain_s=DRAIN_S)
        assert program.output.endswith("raycore: ended by SIGTERM: all requests finished or were aborted\n")


def test_a_server_under_nohup_outlives_its_terminal_and_a_second_signal_ends_it_at_once(joined):
    command = raycore("serve", "--port", "0", "--shutdown-timeout", f"{START_S:g}", "--max-num-seqs", "1", *LIMITS)
    with Program(["nohup", *command], environment=joined) as program:
        program.wait_for("serving")
        send_to_group(program, signal.SIGHUP)
        with streaming(program, 100) as events:
            send_to_group(program, signal.SIGTERM)
            time.sleep(1.0)  # what comes sooner is an echo
            send_to_group(program, signal.SIGTERM)
            assert finish_reasons(events)["abort"]
        assert_ends(program, 0)


def test_a_server_says_that_it_waits_for_nodes_and_ends_at_a_signal(joined, tmp_path):
    path = tmp_path / "socket"
    with serve("--uds", str(path), "--wait-for-nodes", "600", "-dp", "500", environment=joined) as program:
        with httpx.Client(base_url="http://server", transport=httpx.HTTPTransport(uds=str(path))) as client:
            view = {}
            while view.get("phase") != "placing ranks":
                assert program.process.poll() is None, program.output
                if path.exists():
                    answer = client.get("/health")
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")
                    view = answer.json()["loading"]
                time.sleep(0.05)
        assert (view["num_ranks"], view["num_ready"]) == (500, 0)
        program.process.send_signal(signal.SIGTERM)
        assert_ends(program, 128 + signal.SIGTERM)
        assert program.output.endswith("raycore: ended by SIGTERM\n")
    assert not path.exists()


def test_a_batch_run_whose_group_is_signalled_keeps_its_finished_results(joined, tmp_path):
    with batch(tmp_path, 2_000, joined) as program:
        answers = tmp_path / "out.jsonl"
        program.wait_for("is up")
        while not (answers.exists() and answers.stat().st_size):
            assert program.process.poll() is None, program.output
            time.sleep(0.02)
        send_to_group(program, signal.SIGHUP)
        assert_ends(program, 128 + signal.SIGHUP, drain_s=1.0)
        assert "raycore: ended by SIGHUP: " in program.output.splitlines()[-1]
        assert all(json.loads(line) for line in answers.read_text().splitlines())


def test_raycore_generate_ends_when_its_group_is_signalled(joined):
    command = raycore("generate", "--drain-timeout", "0.3", "--json", *LIMITS, *["27 + 58 ="] * 3_000)
    with Program(command, environment=joined) as program:
        program.wait_for("is up")
        send_to_group(program, signal.SIGTERM)
        assert_ends(program, 128 + signal.SIGTERM, drain_s=1.0)
        assert "raycore: ended by SIGTERM" in program.output


def test_a_program_whose_group_is_signalled_ends_by_that_signal():
    """Ray's own handler of SIGTERM exits with the signal's number, and would end what takes longer than 3 s."""
    with Program([sys.executable, "-c", PLAIN]) as program:
        program.wait_for("is up")
        send_to_group(program, signal.SIGTERM)
        assert_ends(program, signal.SIGTERM)
        assert "SIGTERM received" not in program.output, "Ray prints a stack, as after a crash"


@pytest.mark.parametrize("mark", ["raylet/raylet", "_dp0"])
def test_a_signal_during_a_servers_start_ends_the_server_at_once(mark):
    """When this process has come up. From the second on the program waits for Ray, which has interrupts of its own."""
    with serve() as program:
        program.wait_for_process(mark)
        send_to_group(program, signal.SIGHUP)
        send_to_group(program, signal.SIGHUP)
        assert_ends(program, 128 + signal.SIGHUP)
        assert program.output.endswith("raycore: ended by SIGHUP\n")


STARTS_A_PROCESS = """
import os, signal
from raycore.cluster.local_ray.own_processes import RayProcess

signal.signal(signal.SIGHUP, lambda number, frame: print("the program's handler runs", flush=True))
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGHUP))
print(RayProcess(["true"], preexec_fn=lambda: None).wait())
"""


def test_a_starting_ray_process_does_not_run_the_drivers_signal_handler():
    with Program([sys.executable, "-c", STARTS_A_PROCESS]) as program:
        assert program.wait_for_exit(START_S) == 0
    assert program.output == "0\n"


def test_a_server_ends_when_its_terminal_hangs_up(joined):
    """It has nowhere to say so."""
    master, terminal = pty.openpty()
    with serve(terminal=terminal, environment=joined) as program:
        os.close(terminal)
        read_until(master, b"serving")
        os.close(master)
        assert_ends(program, 0)


def read_until(descriptor: int, mark: bytes) -> None:
    """Read what is printed on a terminal until `mark` is there."""
    deadline_s, seen = time.monotonic() + START_S, b""
    while mark not in seen:
        assert time.monotonic() < deadline_s, seen
        if select.select([descriptor], [], [], 1.0)[0]:
            seen += os.read(descriptor, 1 << 16)


def test_a_killed_process_group_leaves_no_process():
    with serve("-tp", "2") as program:
        program.wait_for("serving")
        program.living()
        send_to_group(program, signal.SIGKILL)
        assert program.wait_for_exit(SLACK_S) == -signal.SIGKILL
        program.wait_until_nothing_is_left(10.0)


def test_a_killed_driver_leaves_no_process():
    with serve() as program:
        program.wait_for("serving")
        program.living()
        program.process.kill()
        program.wait_until_nothing_is_left(10.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_signalled_program_gives_a_joined_cluster_all_resources_back(ray_cluster, joined, number):
    pids_before, groups_before, free_before = living_actors(), living_groups(), free_resources()
    with serve(environment=joined) as program:
        program.wait_for("serving")
        pids = living_actors() - pids_before
        assert pids
        send_to_group(program, number)
        assert program.wait_for_exit(GRACE_S + SLACK_S) == (0 if number == signal.SIGTERM else -number)
        eventually(
            lambda: not (wait_until_gone(pids, 0.0) or living_groups() - groups_before), lambda: (pids, living_groups())
        )
        program.wait_until_nothing_is_left(SLACK_S)
    eventually(lambda: has_free(ray_cluster.available_resources(), free_before), ray_cluster.available_resources)


def living_actors() -> set[int]:
    """The process ids of the cluster's actors."""
    return {actor["Pid"] for actor in state.actor_table(None).values() if actor["State"] == "ALIVE"}


def living_groups() -> set[str]:
    """The ids of the cluster's placement groups that have not been removed."""
    return {group for group, entry in placement_group_table().items() if entry["state"] != "REMOVED"}
