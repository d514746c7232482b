"""Programs that exit, or call a start off, while another of their threads starts or uses an engine, in a simulated
cluster.

The engine may lack room: it then waits for nodes, for placement groups of the program's own that Ray hasn't created, or
for their bundles, which other actors use. Whoever waits only for room is soon called off. Nothing is left. A call that
goes on while the program exits never returns, because whoever made it would print its error.

`python -m simulation.program exits FIRST_SEED NUM_SEEDS` prints a line for each seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import simulation.installed  # noqa: F401

# isort: split

from placement.errors import PlacementShortage
from raycore.cluster.connection import is_exiting
from raycore.cluster.engine_start import PLACING, EngineStart
from raycore.errors import InitializationError, RaycoreError
from raycore.llm import LLM
from raycore.ray_api import get, in_bundle
from raycore.sampling_params import SamplingParams
from raycore.system import threading, time
from simulation.cluster.anywhere import MODEL
from simulation.cluster.driver import OPTIONS
from simulation.cluster.judges import left_by_driver
from simulation.neighbour import NEIGHBOUR
from simulation.ray import api, groups
from simulation.ray.cluster import Cluster

_OF_RANK = [{"CPU": 1.0}, {"CPU": 1.0}]
"""The bundles of a rank: its worker's, and its engine's."""
_SETTLED_S = 1.0
"""Virtual seconds for which a start has only waited for room if it does so all the time."""
_CALLED_OFF_S = 4.5
"""Virtual seconds within which a start that waits for room is called off. It looks four times a second, and Ray has 2 s
to finish a group that is removed. Programs that exit wait for 5 s, and then leave it as it is."""
_ANY_START_S = 60.0
"""The same, whatever the start does: a process that starts ends before it hears of anything."""
_LEFT_S = 60.0
"""Virtual seconds after which nothing is left."""


class Program:
    """See the module."""

    def __init__(self, cluster: Cluster, draws: random.Random) -> None:
        self._cluster = cluster
        self._draws = draws
        self._start = EngineStart()
        self._called_off = threading.Event()
        self._uses = cluster.world.generator("whether the engine is used").random() < 0.3
        self._error: BaseException | None = None
        self._kept: list[Any] = []
        """The program's groups, and its other actors."""
        self.waited = False
        """Whether the start only waited for room when the program exited, or called it off."""
        self.exit_s: float | None = None
        """When the program exited. None: it goes on, and has called the start off."""
        self.returned: list[str] = []
        """What calls of an engine that was in use have returned or raised since."""

    def run(self) -> None:
        api.init()
        draws = self._draws
        options: dict[str, Any] = {"data_parallel_size": draws.choice([1, 2, 4, 4]), "standby_delay_s": None}
        if draws.random() < 0.5:
            options |= {"placement_groups": self._groups(options["data_parallel_size"])}
        elif draws.random() < 0.8:
            options |= {"wait_for_nodes_s": 100.0}
        starter = threading.Thread(target=self._run_engine, args=[options], name="starter", daemon=True)
        starter.start()
        time.sleep(draws.choice([draws.uniform(0.0, 4.0), draws.uniform(2.0, 12.0)]))
        self.waited = self._is_placing()
        if self.waited:
            time.sleep(_SETTLED_S)
            self.waited = self._is_placing() and starter.is_alive()
        began_s = time.monotonic()
        if draws.random() < 0.6:
            self._cluster.world.tell("the program exits")
            self.exit_s = began_s
            return
        self._cluster.world.tell("the start is called off")
        self._called_off.set()
        starter.join(_ANY_START_S)
        assert not starter.is_alive(), f"a start goes on {_ANY_START_S:g} s after it was called off"
        took_s = time.monotonic() - began_s
        if self.waited:
            assert isinstance(self._error, InitializationError), f"a start that was called off: {self._error!r}"
            assert took_s < _CALLED_OFF_S, f"a start that waited for room was called off after {took_s:.1f} s"
        time.sleep(_LEFT_S)
        assert not (left := [*self._left()]), left

    def _groups(self, num_ranks: int) -> list[groups.PlacementGroup]:
        """A group for each rank. Some of the bundles may be used by others."""
        made = [groups.placement_group(_OF_RANK, strategy="STRICT_PACK", name="given") for _ in range(num_ranks)]
        self._kept += made
        if self._draws.random() < 0.4 and made[0].wait(30):
            neighbour = NEIGHBOUR.options(num_cpus=1, scheduling_strategy=in_bundle(made[0], 0)).remote()
            get(neighbour.is_there.remote())
            self._kept.append(neighbour)
        return made

    def _is_placing(self) -> bool:
        return self._start.view().phase == PLACING

    def _run_engine(self, options: dict[str, Any]) -> None:
        """Start an engine. If it starts, use it until it is called off, or not at all, and end it."""
        try:
            engine = LLM(
                MODEL,
                use_tqdm_on_load=False,
                _is_wanted=lambda: not self._called_off.is_set(),
                _start=self._start,
                **OPTIONS | options,
            )
            while self._uses and not self._called_off.is_set():
                self._call(engine)
            engine.shutdown()
        except (RaycoreError, PlacementShortage) as error:
            self._error = error
            self._cluster.world.tell(f"the start ends by {type(error).__name__}")

    def _call(self, engine: LLM) -> None:
        said = "returned"
        try:
            engine.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=20, ignore_eos=True), False)
        except RaycoreError as error:
            said = f"raised {error!r}"
            raise
        finally:
            if self.exit_s is not None and is_exiting():
                self.returned.append(f"a call {said} when its program was exiting")

    def _left(self) -> Iterator[str]:
        """What is left, besides the program's own groups and actors."""
        own = {getattr(each, "_actor", None) for each in self._kept}
        for actor in self._cluster.gcs.actors.values():
            if not actor.is_dead and actor not in own:
                yield f"the actor {actor}"
        for group in self._cluster.gcs.groups.values():
            if group.state != "REMOVED" and group.name != "given":
                yield f"the group {group.name}, {group.state}"


def main(cluster: Cluster, num_ranks: int) -> None:
    """See the module."""
    program = Program(cluster, cluster.world.generator("the scenario"))
    ended_s: list[float] = []
    process = cluster.drive("program", program.run)
    process.on_end.append(lambda _: ended_s.append(cluster.world.now_s))
    while not process.has_ended and not cluster.world.failures:
        time.sleep(1.0)
    if program.waited and program.exit_s is not None and ended_s:
        took_s = ended_s[0] - program.exit_s
        assert took_s < _CALLED_OFF_S, f"an exit has waited {took_s:.1f} s for a start without room"
    assert not program.returned, program.returned
    time.sleep(_LEFT_S)
    assert not (left := [*left_by_driver(cluster)]), left
