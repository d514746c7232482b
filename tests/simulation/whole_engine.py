"""A whole engine in a simulated cluster: raycore's own client, control plane, ranks and workers' actors.

Only what computes is simulated, by `simulation.worker`. Run as a program, because the simulated Ray has to be in its
place before anything of raycore is imported: `python -m simulation.whole_engine FIRST_SEED NUM_SEEDS` prints a line for
each seed. With one seed, it prints the story.
"""

from __future__ import annotations

import logging
import random
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import simulation.installed  # noqa: F401

# isort: split

from raycore.client.client import EngineClient
from raycore.client.group import ClientGroup
from raycore.client.inputs import ParsedPrompt
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.supervisor import Supervisor
from raycore.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    ParallelConfig,
    RecoveryConfig,
    SchedulerConfig,
)
from raycore.engine.rank_events import EngineLost
from raycore.errors import EngineDeadError
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.system import threading, time
from raycore.text.no_tokenizer import NoTokenizer
from simulation.engine.options import CHECKPOINT, EOS, MAX_MODEL_LEN, WORKER, model_spec
from simulation.ray import api
from simulation.ray.cluster import Cluster
from simulation.ray.faults import FAULTS, check_nothing_left
from simulation.worker import expected, model
from simulation.worker.model import Shape
from simulation.world.kernel import World
from simulation.world.own_state import OwnState

VOCAB = 32


@dataclass(frozen=True)
class Options:
    """What a seed draws of an engine."""

    num_ranks: int
    num_workers: int
    """Of each rank."""
    in_actors: bool
    """Whether workers are actors."""
    has_standbys: bool
    is_async: bool
    num_requests: int
    num_faults: int

    @staticmethod
    def drawn(draws: random.Random) -> Options:
        num_workers = draws.choice([1, 1, 2])
        return Options(
            num_ranks=draws.randint(1, 3),
            num_workers=num_workers,
            in_actors=num_workers > 1 or draws.random() < 0.4,
            has_standbys=draws.random() < 0.4,
            is_async=draws.random() < 0.5,
            num_requests=draws.choice([2, 8, 24]),
            num_faults=draws.choice([0, 1, 1, 2, 3]),
        )

    def config(self) -> EngineConfig:
        return EngineConfig(
            model=ModelConfig(
                model=CHECKPOINT,
                tokenizer=CHECKPOINT,
                spec=model_spec(VOCAB, [None], False),
                dtype="float32",
                max_model_len=MAX_MODEL_LEN,
                load_format="dummy",
                skip_tokenizer_init=True,
            ),
            cache=CacheConfig(4, True, 0.9, 100),
            scheduler=SchedulerConfig(8, 32, MAX_MODEL_LEN, async_scheduling=self.is_async),
            parallel=ParallelConfig(self.num_workers, self.num_ranks, worker_cls=WORKER),
            executor=ExecutorConfig(
                "ray" if self.in_actors else "inline", "actor_call", init_timeout_s=300.0, shutdown_timeout_s=5.0
            ),
            recovery=RecoveryConfig(
                standby_delay_s=2.0 if self.has_standbys else None,
                placement_timeout_s=120.0,
                max_request_replays=10,
                max_rank_restarts=20,
            ),
            device="cpu",
            log_level=logging.CRITICAL,
        )


class Caller:
    """Gets the outputs of requests."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str | None] = {}
        self.errors: dict[str, BaseException] = {}

    def put(self, updates: list[Any]) -> None:
        with self.changed:
            for update in updates:
                if update.error is not None:
                    self.errors[update.request_id] = update.error
                elif update.output.finished:
                    (only,) = update.output.outputs
                    self.outputs[update.request_id] = list(only.token_ids)
                    self.reasons[update.request_id] = only.finish_reason
            self.changed.notify_all()

    def wait(self, count: int, timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: len(self.outputs) + len(self.errors) == count, timeout_s)


class Engine:
    """What `RunningEngine` has, without what reads files."""

    def __init__(self, options: Options) -> None:
        self.config = options.config()
        self.manager = CoreEngineActorManager(self.config)
        self.client = EngineClient(self.config, NoTokenizer(VOCAB))  # pyright: ignore[reportArgumentType]
        self.clients = ClientGroup(self.client)
        self.supervisor = Supervisor(self.manager, self.clients, self.config)
        self.client.on_broken_stream = self.supervisor.report
        self.manager.start()
        self.supervisor.start()

    def stop(self) -> None:
        self.supervisor.stop()
        self.clients.on_rank_event(EngineLost(EngineDeadError("the engine was shut down")))
        self.manager.stop_ranks()
        self.client.join(2.0)
        self.manager.shutdown()
        self.supervisor.join(2.0)


def main(cluster: Cluster, options: Options, draws: random.Random) -> None:
    """An engine serves requests while things break. All requests get the tokens that they have to get."""
    api.init()
    engine, caller, requests = Engine(options), Caller(), dict[str, EngineRequest]()
    shared = [draws.randrange(VOCAB) for _ in range(20)]
    faults = sorted(draws.uniform(0.0, options.num_requests / 20) for _ in range(options.num_faults))
    begun_s = time.monotonic()
    for number in range(options.num_requests):
        time.sleep(draws.expovariate(20.0))
        while faults and time.monotonic() > begun_s + faults[0]:
            faults.pop(0)
            strike(cluster, engine, draws)
        prompt = shared[: draws.randrange(20)] + [draws.randrange(VOCAB) for _ in range(draws.randrange(1, 20))]
        params = SamplingParams(temperature=0.0, max_tokens=draws.randrange(1, 40))
        (request_id,) = engine.client.submit(
            [ParsedPrompt(None, prompt)], [params], caller.put, request_ids=[f"r{number}"]
        )
        requests[request_id] = EngineRequest(number, request_id, prompt, params, 0, [EOS])
    for _ in faults:
        time.sleep(draws.uniform(0.0, 1.0))
        strike(cluster, engine, draws)
    assert caller.wait(len(requests), 600.0), f"no end: {[each for each in requests if each not in caller.outputs]}"
    assert not caller.errors, caller.errors
    weights = model.weights_of(CHECKPOINT)
    shape = Shape(VOCAB, (None,), False)
    for request_id, request in requests.items():
        right = expected.expected(shape, request, MAX_MODEL_LEN, lambda _: weights)
        got = caller.outputs[request_id], caller.reasons[request_id]
        assert got == right, f"{request_id}: {got} isn't {right}"
    assert not engine.supervisor.has_ended
    cluster.on_boundary = None
    while not cluster.gcs.is_up:  # otherwise raycore takes Ray for gone, and leaves to it what is left
        time.sleep(1.0)
    engine.stop()
    time.sleep(90.0)  # longer than the control store may be away
    check_nothing_left(cluster)


def strike(cluster: Cluster, engine: Engine, draws: random.Random) -> None:
    """Something breaks at one of the processes of the engine."""
    processes = [process for process in cluster.actor_processes if not process.has_ended]
    if not processes:
        return
    process = processes[draws.randrange(len(processes))]
    fault = draws.choice(list(FAULTS))
    cluster.world.tell(f"{fault}: {process.name}")
    FAULTS[fault](cluster, process, draws)


def run(seed: int, *, tells: bool = False) -> World:
    world = World(seed, last_s=5000.0)
    draws = world.generator("the scenario")
    options = Options.drawn(draws)
    cluster = Cluster(world)
    for _ in range(3):
        cluster.add_node(CPU=6)
    OwnState(world)
    try:
        world.run(lambda: main(cluster, options, draws))
        assert not world.failures, world.failures
    except BaseException:
        if tells:
            print(options)
        for at_s, who, what in world.story if tells else []:
            print(f"  {at_s:10.4f} {who}: {what}")
        raise
    return world


if __name__ == "__main__":
    logging.getLogger("raycore").setLevel(logging.CRITICAL)
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, first + count):
        try:
            print(seed, run(seed, tells=count == 1).digest, flush=True)
        except BaseException as error:
            print(seed, "failed:", "".join(traceback.format_exception(error)), flush=True)
