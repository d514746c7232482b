"""Programs as jobs of a Ray cluster, whose head node, where they run, has no CPUs for ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import shared_memory
from job_cluster import ROOT, STEP_S, JobCluster, eventually, free_ports
from kubernetes_shell import KubernetesShell
from number_formats import DTYPE

pytestmark = pytest.mark.timeout(600)

END = "<<end of block>>\n"
NUM_LINES = 80
"""Of a batch that is stopped twice after a few results."""


def blocks_of(page: str) -> list[str]:
    """The commands of a page."""
    return re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def in_turn(blocks: list[str]) -> str:
    """The commands of all these blocks, with a mark after what each of them prints."""
    return "".join(f"{block}printf {shlex.quote(END)}\n" for block in blocks)


@pytest.fixture(scope="module")
def cluster():
    cluster = JobCluster()
    try:
        # five for a service and a batch at a time, each with two ranks
        cluster.start(blocks_of("quickstart-job.md")[0], worker_cpus=5)
        yield cluster
    finally:
        cluster.close()


def whole_lines(path: Path) -> list[bytes]:
    return (
        [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if path.exists() else []
    )


def test_a_batch_job_that_was_stopped_or_killed_continues_and_gives_every_result_once(cluster, tmp_path):
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "27 + 58 =", "max_tokens": 60, "ignore_eos": True}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number in range(NUM_LINES)
    ]
    requests.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"custom_id": "bad"}]))
    command = ("raycore", "run-batch", "-i", str(requests), "-o", str(answers), "--dtype", DTYPE, "--num-threads", "1")
    slowly = (*command, "--max-concurrent-requests", "4")

    stopped = cluster.submit(*slowly, RAY_JOB_STOP_WAIT_TIME_S="30")
    eventually(lambda: len(whole_lines(answers)) >= 8)
    cluster.stop(stopped)
    status, _, last_line = cluster.wait(stopped)
    first = whole_lines(answers)
    assert status == "STOPPED"
    assert last_line == (
        f"raycore: ended by SIGTERM: {len(first)} done, 0 failed, 0 skipped (already done), "
        f"{NUM_LINES + 1 - len(first)} left; run the command again to continue"
    )

    killed = cluster.submit(*slowly)
    eventually(lambda: len(whole_lines(answers)) >= len(first) + 8)
    (program,) = cluster.programs("python", "run-batch")
    os.kill(program, signal.SIGKILL)
    status, _, _ = cluster.wait(killed)
    assert status == "FAILED"
    second = whole_lines(answers)
    assert second[: len(first)] == first
    assert len(second) < NUM_LINES

    status, exit_status, last_line = cluster.wait(cluster.submit(*command))
    assert (status, exit_status) == ("FAILED", 3)
    assert last_line == (
        f"raycore: batch complete: {NUM_LINES - len(second)} done, 1 failed, {len(second)} skipped (already done)"
    )
    assert whole_lines(answers)[: len(second)] == second
    results = [json.loads(line) for line in answers.read_text().splitlines()]
    assert Counter(result["custom_id"] for result in results) == Counter([*map(str, range(NUM_LINES)), "bad"])
    assert [result["custom_id"] for result in results if result["error"]] == ["bad"]
    assert {result["response"]["body"]["choices"][0]["finish_reason"] for result in results if result["response"]} == {
        "length"
    }
    cluster.assert_nothing_is_left()


def test_a_job_with_an_invalid_input_fails_with_the_reason_in_its_last_line(cluster, tmp_path):
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"custom_id": "a"}\n{"custom_id": "b"}\n{"custom_id": "a"}\n')
    status, exit_status, last_line = cluster.wait(
        cluster.submit("raycore", "run-batch", "-i", str(requests), "-o", str(tmp_path / "out.jsonl"))
    )
    assert (status, exit_status) == ("FAILED", 1)
    assert last_line == f"raycore: {requests}: custom_ids aren't unique: 'a' on lines 1 and 3"


def test_a_stopped_server_job_finishes_its_requests_and_leaves_no_process(cluster):
    shared_before = shared_memory.files()
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    serving = cluster.submit(
        *("raycore", "serve", "--port", str(port), "-tp", "2", "--dtype", DTYPE, "--num-threads", "1"),
        *("--shutdown-timeout", "90"),
        RAY_JOB_STOP_WAIT_TIME_S="100",
    )

    def is_healthy() -> bool:
        try:
            return httpx.get(f"{url}/health", timeout=STEP_S).status_code == 200
        except httpx.ConnectError:
            return False

    eventually(is_healthy)
    body = {"prompt": "1 + 2 =", "max_tokens": 3, "ignore_eos": True}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=STEP_S).is_success
    exported = {"generation_tokens_total": "3.0", "rank_serving": "1.0", "num_requests_running": "0.0"}
    eventually(lambda: exported.items() <= exported_metrics(cluster).items())
    body |= {"max_tokens": 500, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=STEP_S) as answer:
        events = (line for line in answer.iter_lines() if line)
        assert json.loads(next(events).removeprefix("data: "))["choices"][0]["finish_reason"] is None
        cluster.stop(serving)
        *_, last, end = events
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert end == "data: [DONE]"
    status, _, last_line = cluster.wait(serving)
    assert (status, last_line) == ("STOPPED", "raycore: ended by SIGTERM: all requests finished or were aborted")
    cluster.assert_nothing_is_left()
    assert shared_memory.abandoned_since(shared_before) == []


def exported_metrics(cluster: JobCluster) -> dict[str, str]:
    """What Ray says of rank 0: by the metrics' names, without raycore's prefix, the values."""
    text = httpx.get(f"http://127.0.0.1:{cluster.metrics_port}/metrics", timeout=STEP_S).text
    return dict(re.findall(r'^ray_raycore_(\w+){.*engine="0".*} (\S+)$', text, re.MULTILINE))


def test_the_job_quick_starts_commands_give_the_documented_results(cluster, tmp_path):
    """Its first block, too: that has started the cluster."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = in_turn(blocks_of("quickstart-job.md")[1:])
    printed = cluster.bash(script.replace("8000", str(free_ports(1)[0])), cwd=tmp_path)
    example, batch, again, server, stop, rest = printed.split(END)
    assert rest == ""
    right = re.search(r"^(\d+) of 100 sums are right$", example, re.MULTILINE)
    assert right is not None
    assert int(right[1]) >= 98
    assert "raycore: batch complete: 2 done, 0 failed, 0 skipped (already done)\n" in batch
    answers = [json.loads(line) for line in batch.splitlines() if line.startswith('{"id"')]
    choices = {answer["custom_id"]: answer["response"]["body"]["choices"][0] for answer in answers}
    assert choices["sum"]["text"] == " 85"
    assert choices["chat"]["message"]["content"].strip() == "344"
    assert "raycore: batch complete: 0 done, 0 failed, 2 skipped (already done)\n" in again
    assert text_of(last_line_of(server)) == " 85"
    assert "raycore: ended by SIGTERM: all requests finished or were aborted\n" in stop


def test_the_kuberay_quick_starts_commands_give_the_documented_results(cluster, tmp_path):
    """With this cluster in the place of every pod."""
    assert httpx.get(f"{cluster.dashboard}/api/jobs/").status_code == 401
    blocks = blocks_of("quickstart-kuberay.md")
    shell = KubernetesShell(tmp_path, cluster.dashboard, cluster.token, cluster.programs_directory)
    *printed, rest = shell.run(in_turn(blocks)).split(END)
    assert rest == ""

    def printed_by(command: str) -> str:
        ((_, text),) = [pair for pair in zip(blocks, printed, strict=True) if command in pair[0]]
        return text

    assert "27 + 58 = 85\n" in printed_by("raycore generate")
    assert "431 - 87 =  344\n" in printed_by("--working-dir examples")
    assert text_of(last_line_of(printed_by("http://localhost:8000"))) == " 85"
    assert "2 of 2 ranks serving" in printed_by("raycore status")
    assert "3 of 3 ranks serving" in printed_by("raycore scale")
    assert "raycore: ended by SIGTERM: all requests finished or were aborted\n" in cluster.logs("api")
    assert text_of(last_line_of(printed_by("http://localhost:8001"))) == " 85"
    answers = (shell.volumes / "raycore-answers" / "answers.jsonl").read_text().splitlines()
    assert sorted(text_of(json.loads(answer)["response"]["body"]) for answer in answers) == [" 344", " 85"]
    cluster.assert_nothing_is_left()


def last_line_of(printed: str) -> Any:
    """It is a server's answer."""
    return json.loads(printed.splitlines()[-1])


def text_of(completion: Any) -> str:
    return completion["choices"][0]["text"]
