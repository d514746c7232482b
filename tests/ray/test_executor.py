"""What `RayExecutor` promises, with real processes and workers that do as told."""

import os
import signal
import threading
import time
from pathlib import Path
from queue import Queue

import msgspec
import pytest
import shared_memory
from waiting import LONG_S

from placement.reserve import RankBundles
from raycore.cache_layout import CacheLayout, CacheLimits, KVCacheConfig
from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.errors import EngineDeadError, InitializationError, InvalidConfig, RpcTimeout, WorkerDied, WorkerFailed
from raycore.messages import StepPlan, StepResult
from raycore.node.processes import is_running
from raycore.worker.rank import RankIdentity

"""For a machine that does much else. What nobody notices takes 10 s or more."""

NUM_WORKERS = 2


def make_config(worker_cls, num_workers=NUM_WORKERS, transport="channel", **executor):
    config = resolve(demo_model_path(), worker_cls=worker_cls, executor_backend="ray", executor_transport=transport)
    return msgspec.structs.replace(
        config,
        parallel=msgspec.structs.replace(config.parallel, tensor_parallel_size=num_workers),
        executor=msgspec.structs.replace(config.executor, **executor),
    )


@pytest.fixture
def make_executor(ray_cluster):
    """Makes executors that haven't been initialized, and shuts them down after the test."""
    from raycore.executor.ray_executor import RayExecutor

    made, groups = [], []

    def make(worker_cls="fake_worker.FakeWorker", **options):
        config = make_config(worker_cls, **options)
        world_size = config.parallel.world_size
        groups.append(ray_cluster.util.placement_group([{"CPU": 1}] * world_size))
        ray_cluster.get(groups[-1].ready())
        made.append(RayExecutor(config, RankIdentity(0, world_size), RankBundles(groups[-1], range(world_size))))
        return made[-1]

    yield make
    for executor in made:
        executor.shutdown()
    for group in groups:
        ray_cluster.util.remove_placement_group(group)


@pytest.fixture(scope="module", params=["channel", "actor_call"])
def shared(request, ray_cluster):
    """Workers that outlive the test: it must leave them as they were."""
    from raycore.executor.ray_executor import RayExecutor

    group = ray_cluster.util.placement_group([{"CPU": 1}] * NUM_WORKERS)
    ray_cluster.get(group.ready())
    config = make_config("fake_worker.FakeWorker", transport=request.param, channel_capacity_bytes=8192)
    executor = RayExecutor(config, RankIdentity(3, 5), RankBundles(group, range(NUM_WORKERS)))
    executor.initialize()
    yield executor
    executor.shutdown()
    ray_cluster.util.remove_placement_group(group)


class Aggregator:
    """Gives back what it gets."""

    def aggregate(self, outputs, output_rank=0):
        return outputs, output_rank


def are_running(pids):
    return [pid for pid in pids if is_running(pid)]


# ---- calls


def test_collective_rpc_runs_a_method_on_every_worker(shared):
    assert shared.collective_rpc("echo", args=(b"a",), kwargs={"suffix": b"b"}) == [(0, b"ab"), (1, b"ab")]


def test_collective_rpc_passes_the_worker_to_a_callable_first(shared):
    offset = 10
    assert shared.collective_rpc(lambda worker, x: worker.rank + x + offset, args=(1,)) == [11, 12]


def test_collective_rpc_returns_only_the_reply_of_unique_reply_rank(shared):
    assert shared.collective_rpc("echo", args=(b"a",), unique_reply_rank=1) == (1, b"a")


def test_collective_rpc_aggregates_the_replies(shared):
    given = {"args": (0,), "kv_output_aggregator": Aggregator()}
    assert shared.collective_rpc("sleep", **given) == ([0, 1], 0)
    assert shared.collective_rpc("sleep", unique_reply_rank=1, **given) == ([0, 1], 1)


def test_arguments_and_results_longer_than_a_message_arrive_whole(shared):
    value = os.urandom(100_000)
    assert shared.collective_rpc("echo", args=(value,)) == [(0, value), (1, value)]


def test_calls_under_way_finish_in_order(shared):
    calls = [shared.collective_rpc("echo", args=(b"%d" % i,), non_block=True) for i in range(5)]
    assert calls[4].result() == [(0, b"4"), (1, b"4")]
    assert all(call.done() for call in calls)
    assert calls[0].result() == [(0, b"0"), (1, b"0")]


def test_a_failure_on_a_worker_that_does_not_reply_is_raised_with_its_traceback(shared):
    with pytest.raises(WorkerFailed, match="RuntimeError: told to fail on 1") as raised:
        shared.collective_rpc("fail", args=(1,), unique_reply_rank=0)
    assert raised.value.rank == 1
    assert "raise RuntimeError" in raised.value.traceback
    assert shared.collective_rpc("fail", args=(7,)) == [0, 1]


def test_an_unknown_method_is_the_callers_error(shared):
    with pytest.raises(WorkerFailed, match="'fly': workers have no such method"):
        shared.collective_rpc("fly")


def test_a_result_that_cannot_be_pickled_is_raised_as_an_error(shared):
    with pytest.raises(WorkerFailed, match="pickle"):
        shared.collective_rpc(lambda worker: (i for i in range(3)))


def test_a_late_reply_is_not_taken_for_the_next(shared):
    with pytest.raises(RpcTimeout, match=r"no reply from workers \[0, 1\]"):
        shared.collective_rpc("sleep", timeout=0.05, args=(1.5,))
    assert shared.collective_rpc("echo", args=(b"next",)) == [(0, b"next"), (1, b"next")]


def test_the_executor_reads_worker_sizes_and_initializes_caches_on_all_workers(shared):
    assert shared.determine_available_memory() == [1000, 999]
    assert [spec.layers[0].block_bytes for spec in shared.get_kv_cache_specs()] == [10, 11]
    assert shared.dtype_name() == "float32"
    shared.initialize_cache(KVCacheConfig(7, CacheLayout((), CacheLimits(16, 64, 64))))
    shared.check_health()
    states = shared.collective_rpc("state")
    assert [(rank.dp_rank, rank.tp_rank, rank.local_rank) for rank, _, _ in states] == [(3, 0, 0), (3, 1, 1)]
    assert all(rank.num_local_workers == 5 and rank.distributed_init.startswith("tcp://") for rank, _, _ in states)
    assert all((num_blocks, is_warm) == (7, True) for _, num_blocks, is_warm in states)
    assert len(are_running(shared.worker_pids())) == NUM_WORKERS


# ---- steps


def test_steps_in_flight_return_their_results_in_order(shared):
    pending = [shared.execute(StepPlan(step)) for step in range(2)]
    assert [(p.result().step, p.result().token_ids) for p in pending] == [(0, b"tokens"), (1, b"tokens")]


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "later"])
def test_the_results_of_all_workers_may_be_aggregated_to_a_steps(shared, is_late):
    """At once, or when the devices have finished."""
    shared.collective_rpc(_report_steps, args=(is_late,))
    shared.kv_output_aggregator = Aggregator()
    try:
        steps = [shared.execute(StepPlan(step)) for step in range(3)]
        for number, step in enumerate(steps):
            outputs, output_rank = step.result()
            assert output_rank == 0
            assert [output and (output.step, output.token_ids) for output in outputs] == [(number, b"tokens"), None]
        shared.collective_rpc(_report_steps, args=(is_late, [0, 1]))
        outputs, _ = shared.execute(StepPlan(3)).result()
        assert [output.failed for output in outputs] == [[(0, "rank 0")], [(1, "rank 1")]]
    finally:
        shared.kv_output_aggregator = None
        shared.collective_rpc(lambda worker: vars(worker).pop("execute_model") and None)
    assert shared.execute(StepPlan(4)).result().token_ids == b"tokens"


def _report_steps(worker, is_late, failing=()):
    """Have the worker finish its steps later, and report of each that its request has failed, if its rank is listed."""

    class Step:
        def __init__(self, result):
            self.due_s, self.value = time.monotonic() + 0.02, result

        def done(self):
            return time.monotonic() >= self.due_s

        def result(self, timeout=None):
            time.sleep(max(0, self.due_s - time.monotonic()))
            return self.value

    def execute_model(plan):
        result = type(worker).execute_model(worker, plan)
        if worker.rank in failing:
            result = StepResult(plan.step, failed=[(worker.rank, f"rank {worker.rank}")])
        return Step(result) if is_late else result

    worker.execute_model = execute_model


def test_callbacks_run_on_the_thread_that_reads_the_replies(shared):
    told = []
    calls = [shared.collective_rpc("echo", args=(b"%d" % i,), non_block=True) for i in range(3)]
    for call in calls:
        call.add_done_callback(lambda done: told.append((done.result()[1], threading.current_thread())))
    step = shared.execute(StepPlan(1))
    step.add_done_callback(lambda done: told.append((done.result().step, threading.current_thread())))
    reader = threading.Thread(target=shared.check_health)
    reader.start()
    reader.join()
    assert len(told) == 4  # a worker may be ahead of the other, so their order is open
    assert set(told) == {*(((1, b"%d" % i), reader) for i in range(3)), (1, reader)}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_fails_on_any_rank_is_reported_at_once(make_executor, rank):
    executor = make_executor(shutdown_timeout_s=0.1)
    executor.initialize()
    with pytest.raises(WorkerFailed, match=f"rank {rank} can't do step 5000") as raised:
        executor.execute(StepPlan(5000, freed_slots=[rank])).result()
    assert raised.value.rank == rank


def test_a_failure_after_the_steps_result_is_reported_too(make_executor):
    executor = make_executor()
    executor.initialize()
    reported = threading.Event()
    executor.register_failure_callback(lambda failure: reported.set())
    executor.collective_rpc(_fail_late)
    executor.execute(StepPlan(1)).result()
    with pytest.raises(WorkerFailed, match="too late"):
        executor.collective_rpc("sleep", args=(0.01,))
    assert reported.wait(LONG_S)


def _fail_late(worker):
    def execute_model(plan):
        time.sleep(0.1)
        raise ValueError("too late")

    if worker.rank == 1:
        worker.execute_model = execute_model


# ---- deaths


@pytest.mark.parametrize("transport", ["channel", "actor_call"])
def test_a_killed_worker_is_known_at_once(make_executor, transport):
    executor = make_executor(transport=transport)
    executor.initialize()
    failures = Queue()
    executor.register_failure_callback(failures.put)
    call = executor.collective_rpc("sleep", args=(1e4,), non_block=True)

    def kill():
        time.sleep(0.2)  # so that the call waits
        os.kill(executor.worker_pids()[1], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(WorkerDied) as raised:
        call.result()
    thread.join()
    died = raised.value
    assert (died.rank, died.pid) == (1, executor.worker_pids()[1])
    assert died.node
    assert died.cause
    assert failures.get(timeout=LONG_S) == died
    with pytest.raises(WorkerDied):
        executor.execute(StepPlan(1))
    with pytest.raises(WorkerDied):
        executor.check_health()
    executor.register_failure_callback(failures.put)
    assert failures.get(timeout=LONG_S) == died


def test_a_worker_that_exits_is_known_at_once(make_executor):
    executor = make_executor(shutdown_timeout_s=0.1)
    executor.initialize()
    with pytest.raises(WorkerDied) as raised:
        executor.collective_rpc("exit", args=(0,))
    assert raised.value.rank == 0


# ---- start and end


def test_the_first_failing_workers_own_traceback_surfaces(make_executor):
    executor = make_executor("fake_worker.FailsToLoad")
    with pytest.raises(InitializationError, match=r"worker 1 .*OSError: no such tensor: lm_head") as raised:
        executor.initialize()
    assert "in load_model" in str(raised.value)
    assert isinstance(raised.value.__cause__, OSError)
    assert not are_running(executor.worker_pids())


def test_a_worker_that_dies_during_the_start_fails_the_start(make_executor):
    shared_before = shared_memory.files()
    executor = make_executor("fake_worker.DiesLoading")
    with pytest.raises(InitializationError, match=r"worker 1 .*died"):
        executor.initialize()
    assert not are_running(executor.worker_pids())
    assert shared_memory.abandoned_since(shared_before) == []


def test_a_worker_class_that_does_not_exist_is_named(make_executor):
    with pytest.raises(InitializationError, match=r"worker_cls='fake_worker.NoSuchWorker'") as raised:
        make_executor("fake_worker.NoSuchWorker").initialize()
    assert isinstance(raised.value.__cause__, InvalidConfig)


def test_the_start_of_workers_has_a_deadline(make_executor):
    executor = make_executor(init_timeout_s=0.01)
    with pytest.raises(InitializationError, match=r"didn't start within init_timeout_s=0\.01"):
        executor.initialize()


def test_an_executors_shutdown_leaves_no_worker_socket_or_shared_memory(make_executor):
    shared_before = shared_memory.files()
    executor = make_executor()
    executor.initialize()
    pids = executor.worker_pids()
    name = executor._transport._board.token.hex()
    assert Path("/proc/net/unix").read_text().count(name) == 1 + NUM_WORKERS
    executor.collective_rpc("echo", args=(b"",))
    executor.shutdown()
    executor.shutdown()
    assert not are_running(pids)
    assert shared_memory.abandoned_since(shared_before) == []
    assert name not in Path("/proc/net/unix").read_text()
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.collective_rpc("echo", args=(b"",))


def test_an_executors_shutdown_kills_workers_that_do_not_stop(make_executor):
    executor = make_executor("fake_worker.NeverStops", shutdown_timeout_s=0.2)
    executor.initialize()
    executor.shutdown()
    assert not are_running(executor.worker_pids())


def test_shutdown_wakes_a_waiting_call(make_executor):
    executor = make_executor(shutdown_timeout_s=0.2)
    executor.initialize()
    call = executor.collective_rpc("sleep", args=(30,), non_block=True)
    threading.Timer(0.2, executor.shutdown).start()
    with pytest.raises(EngineDeadError):
        call.result(LONG_S)


def test_an_executor_may_be_shut_down_before_its_start(make_executor):
    executor = make_executor()
    executor.shutdown()
    with pytest.raises(EngineDeadError, match="never initialized"):
        executor.execute(StepPlan(1))
