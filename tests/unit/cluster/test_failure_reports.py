"""What Ray says of a death becomes one line with the cause first."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from raycore.cluster.failure_reports import dead_process, describe_death, describe_loss, pid_of_dead_actor, root_cause
from raycore.errors import WorkerDied
from raycore.messages import EngineInfo

INFO = EngineInfo(
    dp_rank=1,
    pid=4711,
    node_id="0123456789abcdef",
    num_blocks=1,
    block_size=16,
    max_model_len=16,
    dtype="float32",
    timings_s={},
    worker_pids=[],
)

KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: DPEngineCoreActor
\tactor_id: 2f5b38ba7f68b1bab638e6c701000000
\tpid: 13608
\tname: raycore_ab_dp1
\tnamespace: 8af1ed49-97c9-4b35-8af5-9fd5f7f17443
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was \
killed by the OOM killer, (2) ray stop --force was called."""

EXITED = """The actor died unexpectedly before finishing this task.
\tclass_name: A
The actor is dead because its worker process has died. Worker exit type: INTENDED_USER_EXIT Worker exit detail: \
Worker exits with an exit code 0. exit_actor() is called."""

RAY_KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: A
The actor is dead because it was killed by `ray.kill`."""


def task_error(cause: Exception) -> RayTaskError:
    """As `ray.get` raises it."""
    trace = f'Traceback (most recent call last):\n  File "step.py", line 3, in run\n    boom()\n{cause!r}'
    return RayTaskError("run", trace, cause, "ray::run", 99, "10.0.0.1").as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(
            RayActorError(error_msg=KILLED),
            "SYSTEM_ERROR: Worker unexpectedly exits with a connection error code 2. End of file. "
            "It crashed or was killed, for example by the out-of-memory killer.",
            id="kill -9",
        ),
        pytest.param(
            RayActorError(error_msg=EXITED),
            "INTENDED_USER_EXIT: Worker exits with an exit code 0. exit_actor() is called.",
            id="exit",
        ),
        pytest.param(RayActorError(error_msg=RAY_KILLED), "it was killed by `ray.kill`.", id="ray.kill"),
        pytest.param(RayActorError(), RayActorError.BASE_ERROR_MSG, id="nothing known"),
        pytest.param(
            ActorUnavailableError("connection lost", None),
            "The actor None is unavailable: connection lost. The task may or may not have been executed on the actor.",
            id="unavailable",
        ),
        pytest.param(task_error(ValueError("bad shape")), "ValueError: bad shape", id="an exception"),
        pytest.param(task_error(WorkerDied(0, 7, "n1", "oom")), "worker 0 (pid 7, node n1) died: oom", id="our own"),
        pytest.param(task_error(KeyError()), "KeyError", id="no message"),
        pytest.param(OSError("plain"), "OSError: plain", id="not Ray's"),
    ],
)
def test_a_failure_report_begins_with_the_cause(error: Exception, expected: str):
    assert describe_death(error).splitlines()[0] == expected


def test_a_failure_report_has_the_exceptions_traceback_without_colours():
    text = describe_death(task_error(ValueError("bad shape")))
    assert 'File "step.py", line 3, in run' in text
    assert "\x1b" not in text


def test_the_root_cause_is_the_exception_raised_in_the_actor():
    cause = WorkerDied(0, 7, "n1", "oom")
    assert root_cause(task_error(cause)) is cause
    dead = RayActorError(error_msg=KILLED)
    assert root_cause(dead) is dead


@pytest.mark.parametrize(
    ("error", "process"),
    [
        pytest.param(RayActorError(error_msg=KILLED), (4711, "0123456789abcdef"), id="the engine's own"),
        pytest.param(task_error(WorkerDied(0, 7, "n1", "oom")), (7, "n1"), id="a worker's"),
        pytest.param(task_error(ValueError("bad shape")), (None, None), id="no process has died"),
        pytest.param(None, (None, None), id="nothing was raised"),
    ],
)
def test_the_process_that_died_is_read_from_the_error(error: Exception | None, process: tuple[int | None, str | None]):
    assert dead_process(error, INFO) == process


def test_a_dead_actors_pid_is_read_from_rays_error():
    assert pid_of_dead_actor(RayActorError(error_msg=KILLED)) == 13608
    assert pid_of_dead_actor(RayActorError(error_msg=RAY_KILLED)) is None
    assert pid_of_dead_actor(task_error(ValueError("\tpid: 5"))) is None


@pytest.mark.parametrize(
    ("error", "begins"),
    [
        (None, "dp_rank 1 (pid 4711, node 01234567): run() returned without a request to stop"),
        (RayActorError(error_msg=RAY_KILLED), "dp_rank 1 (pid 4711, node 01234567) died: it was killed by `ray.kill`."),
        (
            task_error(WorkerDied(0, 7, "n1", "oom")),
            "worker 0 (pid 7, node n1) died: oom\ndp_rank 1 (pid 4711, node 01234567) can't continue\n",
        ),
    ],
)
def test_a_loss_names_the_cause_and_the_rank(error: Exception | None, begins: str):
    assert describe_loss(error, INFO, 1).startswith(begins)
