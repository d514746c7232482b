"""An engine that belongs to a driver, a job, an actor, a task or a Serve replica, until its standard input ends.

Run by `ends`, with the kind of owner, the nodes of the owner and of the reaper, and a directory as
arguments. Prints a line of JSON when the engine is up, and one when a request has failed. With `end_serve` as its
argument, ends what another such program has left to Serve.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycore import LLM, RaycoreError, SamplingParams
from raycore.cluster import owner
from raycore.demo import demo_model_path
from raycore.serve import build_openai_app

OPTIONS: dict[str, Any] = {
    # a rank with a worker on each node, and a standby
    "data_parallel_size": 2,
    "placement_strategy": "strict",
    "executor_backend": "ray",
    "standby_delay_s": 0.0,
    "dtype": "float32",
    "max_model_len": 256,
    "num_threads": 1,
}
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def start(reaper_node: str) -> LLM:
    """Start an engine, with its reaper on a node where Ray may have to put it."""
    on_node = owner.on_node
    owner.on_node = lambda node_id, *, soft=False: on_node(reaper_node, soft=soft)
    return LLM(demo_model_path(), use_tqdm_on_load=False, **OPTIONS)


def generate_on(llm: LLM) -> str:
    """Generate until a request fails. Returns why."""
    while True:
        try:
            llm.generate(["27 + 58 ="] * 8, LONG, use_tqdm=False)
        except RaycoreError as error:
            return str(error)


class Owner:
    """An actor with an engine."""

    def __init__(self, reaper_node: str) -> None:
        self.llm = start(reaper_node)
        threading.Thread(target=generate_on, args=[self.llm], daemon=True).start()

    def pid(self) -> int:
        return os.getpid()


def work(reaper_node: str, path: str) -> None:
    """A task with an engine, or a job's driver."""
    llm = start(reaper_node)
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    generate_on(llm)


def wait_for_pid(path: str, has_ended: Callable[[], object]) -> int:
    """Wait for the process id that `work` writes."""
    while not os.path.exists(path) or not os.path.getsize(path):
        assert not has_ended(), has_ended()
        time.sleep(0.1)
    with open(path) as file:
        return int(file.read())


def submit(jobs: JobSubmissionClient, command: str) -> str:
    """Submit a job as soon as the cluster takes one. Returns its id."""
    deadline_s = time.monotonic() + 60
    while True:
        try:
            return jobs.submit_job(entrypoint=command)
        except RuntimeError:  # "No available agent"
            if time.monotonic() > deadline_s:
                raise
            time.sleep(1.0)


def end_serve() -> None:
    """End what another program has left to Serve."""
    ray.init(log_to_driver=False, logging_level="ERROR")
    serve.shutdown()


def main(kind: str, node: str, reaper_node: str, directory: str) -> None:
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
    context = ray.init(log_to_driver=False, logging_level="ERROR")
    held: Any = None
    path = f"{directory}/pid"
    if kind == "driver":
        held = start(reaper_node)
        threading.Thread(target=lambda: say(error=generate_on(held)), daemon=True).start()
        say(owner=os.getpid())
    elif kind == "actor":
        held = ray.remote(Owner).options(**options).remote(reaper_node)
        say(owner=ray.get(held.pid.remote()))
    elif kind == "task":
        held = ray.remote(work).options(max_retries=0, **options).remote(reaper_node, path)
        say(owner=wait_for_pid(path, lambda: ray.wait([held], timeout=0)[0] and ray.get(held)))
    elif kind == "submitted":
        work(reaper_node, path)
    elif kind == "job":
        jobs = JobSubmissionClient(f"http://{context.dashboard_url}")
        command = [sys.executable, __file__, "submitted", node, reaper_node, directory]
        job = submit(jobs, shlex.join(command))
        is_over = (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.SUCCEEDED)
        say(owner=wait_for_pid(path, lambda: jobs.get_job_status(job) in is_over and jobs.get_job_logs(job)))
    else:
        model = {"model_id": "demo", "model_source": str(demo_model_path())}
        serve.start(proxy_location="Disabled")
        serve.run(build_openai_app({"llm_configs": [{"model_loading_config": model, "engine_kwargs": OPTIONS}]}))
        say(owner=None)
    sys.stdin.read()
    if kind == "driver":
        held.shutdown()
    elif kind == "job":
        jobs.stop_job(job)
    elif kind == "replica":
        serve.shutdown()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background program ignores it
    if sys.argv[1:] == ["end_serve"]:
        end_serve()
    else:
        main(*sys.argv[1:])
