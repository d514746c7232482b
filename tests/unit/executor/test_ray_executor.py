"""What an executor says of workers that fail, without Ray."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, RayError, RayTaskError, UnserializableException

from raycore.errors import InitializationError, WorkerDied, WorkerFailed
from raycore.executor import ray_executor
from raycore.executor.ray_executor import WorkerGroup


@pytest.mark.parametrize(
    ("error", "failure", "text"),
    [
        (ActorDiedError(), WorkerDied, "worker 0 died while starting: "),
        (RayTaskError("join", "", ValueError("7 is odd")), WorkerFailed, "worker 0 failed while starting: ValueError"),
        (UnserializableException("7 is odd"), WorkerFailed, "worker 0 failed while starting: UnserializableException"),
    ],
)
def test_a_worker_that_raises_has_not_died(error: RayError, failure: type, text: str, monkeypatch):
    def get(ref: object) -> None:
        raise error

    monkeypatch.setattr(ray_executor, "get", get)
    workers = object.__new__(WorkerGroup)
    workers.addresses = []
    ref: object = None
    assert isinstance(workers.failure(0, ref), failure)  # type: ignore[arg-type]
    with pytest.raises(InitializationError, match=text):
        workers._check_started(0, ref)  # type: ignore[arg-type]
