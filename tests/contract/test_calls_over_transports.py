"""Calls and steps over every transport: who replies to what, and which thread learns of it."""

from __future__ import annotations

import math
import sys
import threading
import time
from typing import Any

import cloudpickle
import pytest
from waiting import LONG_S

from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.messages import GrammarOutput, StepPlan, StepResult
from raycore.rpc.client import RpcClient
from raycore.rpc.wire import encode_call
from raycore.worker.rank import WorkerRank

# workers can't import a test module, so what they are to call travels whole
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def workers(ray_cluster):
    from raycore.worker.worker_actor import WORKER_ACTOR

    config = resolve(demo_model_path(), worker_cls="fake_worker.FakeWorker").encode()
    actors = [WORKER_ACTOR.options(num_cpus=0).remote(config, f"worker {rank}") for rank in range(2)]
    ray_cluster.get([actor.preload.remote(False) for actor in actors])
    yield actors
    for actor in actors:
        ray_cluster.kill(actor)


# actor calls come last, because closing them ends the actors' `wait_until_stopped()` for good
@pytest.fixture(scope="module", params=["adaptive", "spin", "no board", "actor calls"])
def client(request, ray_cluster, workers):
    from raycore.rpc import channel
    from raycore.rpc.actor_call import ActorCallTransport
    from raycore.rpc.channel import ChannelTransport

    with pytest.MonkeyPatch.context() as patch:
        if request.param == "no board":
            patch.setattr(channel.Board, "create", lambda num_workers: None)
        if request.param == "actor calls":
            transport: Any = ActorCallTransport(workers)
        else:
            nodes = [address.node_id for address in ray_cluster.get([worker.address.remote() for worker in workers])]
            transport = ChannelTransport(workers, nodes, 4096, math.inf if request.param == "spin" else 100e-6)
        for rank, worker in enumerate(workers):
            transport.accept(rank, ray_cluster.get(worker.join.remote(transport.invite(rank))))
        transport.finish_joining()
        ray_cluster.get([worker.start.remote(WorkerRank(0, rank, 2, rank, 2)) for rank, worker in enumerate(workers)])
        serving = transport.start()
        yield RpcClient(transport, 2, lambda: RuntimeError("the transport was closed"))
        transport.close()
        ray_cluster.get(serving, timeout=LONG_S)


def call(client: RpcClient, method: Any, *args: Any):
    return client.call(method, encode_call(method, args, None, None), None, None, LONG_S)


def together(results: list[StepResult | None]) -> StepResult:
    return StepResult(sum(result.step for result in results if result is not None), failed=[(len(results), "of two")])


@pytest.mark.parametrize("delay_s", [0.0, 0.05], ids=["at once", "later"])
def test_a_step_is_answered_by_one_worker_or_aggregated_over_all_workers(client: RpcClient, delay_s: float):
    """At once, or when their devices have finished, which takes the second one longer."""
    assert client.step(StepPlan(5), LONG_S).result() == StepResult(5, b"tokens")
    call(client, _step_on_all, delay_s).result()
    try:
        steps = [client.step(StepPlan(step), LONG_S, together) for step in (7, 8)]
        # the second worker's result is ten times the first one's
        assert [step.result().step for step in steps] == [77, 88]
        assert steps[0].result().failed == [(2, "of two")]
        assert call(client, "echo", b"next").result() == [(0, b"next"), (1, b"next")]
    finally:
        call(client, _step_as_usual).result()


@pytest.mark.parametrize("size", [1, 5000], ids=["short", "in parts"])
@pytest.mark.parametrize("aggregate", [None, together], ids=["by one", "by all"])
def test_masks_come_after_the_plan_and_replies_after_the_masks(client: RpcClient, aggregate: Any, size: int):
    masks = GrammarOutput(bytes(4), bytes(4), bytes(size))
    call(client, _sample_together, aggregate is not None).result()
    try:
        for step in (3, 4):
            pending = client.step(StepPlan(step, masked=True), LONG_S, aggregate)
            client.sample_tokens(pending, masks, LONG_S)
            expected = step + size if aggregate is None else 11 * step + 2 * size
            assert pending.result().step == expected
    finally:
        call(client, _step_as_usual).result()


def test_callbacks_run_on_the_thread_that_reads_the_replies(client: RpcClient):
    told: list[tuple[Any, threading.Thread]] = []
    pending = [call(client, "sleep", 0.0), client.step(StepPlan(1), LONG_S)]
    for each in pending:
        each.add_done_callback(lambda done: told.append((done, threading.current_thread())))
    reader = threading.Thread(target=call(client, "sleep", 0.05).result)
    reader.start()
    reader.join()
    assert len(told) == 2
    assert {id(done) for done, _ in told} == {id(each) for each in pending}
    assert {thread for _, thread in told} == {reader}


def _step_on_all(worker: Any, delay_s: float) -> None:
    class Step:
        def __init__(self, result: StepResult) -> None:
            self.due_s, self.value = time.monotonic() + delay_s * (1 + worker.rank), result

        def done(self) -> bool:
            return time.monotonic() >= self.due_s

        def result(self, timeout: float | None = None) -> StepResult:
            time.sleep(max(0.0, self.due_s - time.monotonic()))
            return self.value

    def execute_model(plan: StepPlan) -> Any:
        result = StepResult(plan.step * 10**worker.rank)
        return Step(result) if delay_s else result

    worker.execute_model = execute_model


def _sample_together(worker: Any, all_reply: bool) -> None:
    """Its steps tell how long their masks are. Without them, this fails."""

    def execute_model(plan: StepPlan) -> Any:
        assert plan.grammar is not None
        if all_reply or worker.rank == 0:
            return StepResult(plan.step * 10**worker.rank + len(plan.grammar.bitmask))
        return None

    worker.execute_model = execute_model


def _step_as_usual(worker: Any) -> None:
    del worker.execute_model
