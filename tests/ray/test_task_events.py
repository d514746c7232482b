"""Calls of raycore's actors leave nothing in the list of tasks that Ray's GCS keeps for all jobs."""

from __future__ import annotations

from contextlib import closing

import pytest
from engine_probe import wait_until_reachable
from number_formats import DTYPE
from ray._private.state import state
from ray.core.generated.gcs_pb2 import TaskEvents
from waiting import eventually

from raycore import LLM, SamplingParams
from raycore.cluster.owner import Reaper
from raycore.control.control_actor import EngineControl
from raycore.demo import demo_model_path
from raycore.engine.engine_actor import DPEngineCoreActor
from raycore.server.multi_process.api_server import APIServer
from raycore.worker.worker_actor import WorkerActor

OWN_CLASSES = [cls.__name__ for cls in (DPEngineCoreActor, WorkerActor, EngineControl, Reaper, APIServer)]


def tasks() -> set[str]:
    """The names of the tasks that the GCS lists, of all jobs of the cluster."""
    return {
        TaskEvents.FromString(events).task_info.name for events in state._connect_and_get_accessor().get_task_events()
    }


@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_an_engine_leaves_no_task_events(ray_cluster, backend):
    @ray_cluster.remote(num_cpus=0)
    class Witness:
        def is_asked(self) -> None: ...

    options = {"num_threads": 1, "max_model_len": 1000, "dtype": DTYPE, "standby_delay_s": None}
    with LLM(demo_model_path(), engine_name="silent", executor_backend=backend, **options) as llm:
        llm.generate(["27 + 58 ="] * 2, SamplingParams(max_tokens=2), use_tqdm=False)
        with closing(llm.stream("1 + 1 =", SamplingParams(max_tokens=900, ignore_eos=True))) as outputs:
            next(outputs)
        llm.collective_rpc(lambda worker: None)
        wait_until_reachable(llm)  # by an actor's handle that is looked up by name
    # Ray reports the events of a process together, so once this call is listed, earlier ones would be
    witness = Witness.remote()
    ray_cluster.get(witness.is_asked.remote())
    eventually(lambda: "Witness.is_asked" in tasks(), tasks)
    assert [name for name in tasks() if name.partition(".")[0] in OWN_CLASSES] == []
