"""Programs whose Ray node ends while they start an engine on other nodes: they hear of it, and are left with nothing.

`python -m simulation.program bereft FIRST_SEED NUM_SEEDS` prints a line for each seed.
"""

from __future__ import annotations

from typing import Any

import simulation.installed  # noqa: F401

# isort: split

import pytest

from placement.errors import PlacementShortage
from raycore.cluster import own_node
from raycore.errors import EngineDeadError, RaycoreError
from raycore.llm import LLM
from raycore.ray_api import get, on_node
from raycore.sampling_params import SamplingParams
from raycore.system import time
from simulation.cluster.anywhere import MODEL
from simulation.cluster.driver import OPTIONS
from simulation.neighbour import NEIGHBOUR
from simulation.program import PutIn
from simulation.putting_in import substitute
from simulation.ray import api
from simulation.ray.cluster import Cluster
from simulation.world import descriptors
from simulation.world.threads import world

_PROMPT: Any = {"prompt_token_ids": [3, 5, 7, 11]}
_LATEST_S = 5.0
"""Virtual seconds after which the node ends at the latest. Most starts take a bit longer."""
_HEARD_S = 5.0
"""Within so many, a program hears that its node has ended."""


class Program:
    """See the module."""

    def __init__(self, cluster: Cluster, num_ranks: int) -> None:
        self._cluster = cluster
        self._draws = cluster.world.generator("the scenario")
        self._options = OPTIONS | {"data_parallel_size": min(num_ranks, 2), "init_timeout_s": 30.0}
        self._options |= {"placement_timeout_s": 10.0}

    def run(self) -> None:
        api.init()
        head = self._cluster.head
        here = world()
        neighbour = NEIGHBOUR.options(num_cpus=head.total["CPU"], scheduling_strategy=on_node(head.id)).remote()
        get(neighbour.is_there.remote())
        time.sleep(self._draws.uniform(0.0, 2.0))
        here.call_later(self._draws.uniform(0.0, _LATEST_S), lambda: here.kill(head.raylet))
        try:
            llm = LLM(MODEL, use_tqdm_on_load=False, **self._options)
        except (RaycoreError, PlacementShortage) as error:
            here.tell(f"the engine doesn't start: {type(error).__name__}")
        else:
            time.sleep(_LATEST_S + _HEARD_S)
            with pytest.raises(EngineDeadError, match="node of this process has ended"):
                llm.generate([_PROMPT], SamplingParams(max_tokens=4), use_tqdm=False)
            llm.shutdown()
        time.sleep(_HEARD_S)
        assert here.current is not None
        process = here.current.process
        assert not (left := descriptors.open_in(process)), f"the program has the descriptors {left}"
        threads = [each.name for each in process.threads if not each.is_over and each.name.startswith("raycore")]
        assert not threads, threads


def main(cluster: Cluster, num_ranks: int) -> None:
    """See the module."""
    process = cluster.drive("program", Program(cluster, num_ranks).run)
    while not process.has_ended and not cluster.world.failures:
        time.sleep(1.0)


def _sockets_that_do_not_connect_stay_open() -> None:
    def connect(path: str, timeout_s: float) -> Any:
        connection = own_node.socket.socket(own_node.socket.AF_UNIX)
        connection.connect(path)
        return connection

    substitute(own_node, "_connect", connect)


FAULTS = [PutIn(_sockets_that_do_not_connect_stay_open, 0, "the program has the descriptors")]
