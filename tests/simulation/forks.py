"""Programs with an engine that fork: the child has no engine, can't start any, and its end leaves the parent's alone.

`python -m simulation.program forks FIRST_SEED NUM_SEEDS` prints a line for each seed.
"""

from __future__ import annotations

from typing import Any

import simulation.installed  # noqa: F401

# isort: split

import pytest

from raycore.cluster import connection
from raycore.errors import InitializationError
from raycore.llm import LLM
from raycore.sampling_params import SamplingParams
from raycore.system import time
from simulation.cluster.anywhere import MODEL
from simulation.cluster.driver import OPTIONS
from simulation.cluster.judges import left_by_driver
from simulation.program import PutIn
from simulation.ray import api
from simulation.ray.cluster import Cluster
from simulation.world.kernel import Process
from simulation.world.system import _hooks_of_forks, fork, run_exit_hooks

_PROMPT: Any = {"prompt_token_ids": [3, 5, 7, 11]}
_MOST_RANKS = 3
"""For so many there is room."""
_ENDS_S = 30.0
"""Virtual seconds within which a child ends: it waits for nothing of its parent's."""


class Program:
    """See the module."""

    def __init__(self, cluster: Cluster, num_ranks: int) -> None:
        self._cluster = cluster
        self._draws = cluster.world.generator("the scenario")
        self._options = OPTIONS | {"data_parallel_size": min(num_ranks, _MOST_RANKS)}

    def run(self) -> None:
        api.init()
        llm = LLM(MODEL, use_tqdm_on_load=False, **self._options)
        before = self._tokens(llm)
        for _ in range(self._draws.choice([1, 2])):
            time.sleep(self._draws.uniform(0.0, 1.0))
            self._wait_for(fork("child", self._run_child))
            assert self._tokens(llm) == before, "an engine of a program that has forked computes other tokens"
        llm.shutdown()
        time.sleep(_ENDS_S)
        assert not (left := [*left_by_driver(self._cluster)]), left

    @staticmethod
    def _tokens(llm: LLM) -> list[int]:
        (output,) = llm.generate([_PROMPT], SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def _run_child(self) -> None:
        """What a child does, in any order, before its exit hooks run."""
        if self._draws.random() < 0.7:
            with pytest.raises(InitializationError, match="forked"):
                LLM(MODEL, use_tqdm_on_load=False, **self._options)
        run_exit_hooks()

    def _wait_for(self, child: Process) -> None:
        deadline_s = time.monotonic() + _ENDS_S
        while not child.has_ended:
            assert time.monotonic() < deadline_s, "a forked process doesn't end"
            time.sleep(0.1)


def main(cluster: Cluster, num_ranks: int) -> None:
    """See the module."""
    process = cluster.drive("program", Program(cluster, num_ranks).run)
    while not process.has_ended and not cluster.world.failures:
        time.sleep(1.0)


def _children_end_the_engines_of_their_parents() -> None:
    _hooks_of_forks[:] = [each for each in _hooks_of_forks if each is not connection._leave_to_parent]


FAULTS = [PutIn(_children_end_the_engines_of_their_parents, 0, "forked")]
