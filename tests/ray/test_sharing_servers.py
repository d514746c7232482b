"""Two servers whose ranks share experts: the reference tokens from both, one that is killed, and one that returns."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import sharing_server
from programs import Program
from sharing_server import OPTIONS, tokens
from waiting import LONG_S, eventually

from raycore import LLM
from raycore.errors import InvalidConfig, InvalidInput
from raycore.parts.servers.cluster.coordinator import NAMESPACE
from raycore.ray_api import cluster_address, find_actor

COMMAND = [sys.executable, str(Path(sharing_server.__file__))]


@contextmanager
def generating(llm: LLM, expected: list[list[int]]):
    """While the block runs, requests do, again and again, and get the expected tokens. Yields what counts them."""
    is_over, done = threading.Event(), []

    def run() -> None:
        while not is_over.is_set():
            assert tokens(llm) == expected
            done.append(len(expected))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield done
        finally:
            is_over.set()
        running.result(120)


def started(path: str) -> Program:
    """The other server, which is starting."""
    return Program([*COMMAND, path, "1"], has_input=True, environment={"RAY_ADDRESS": cluster_address()})


def coordinator() -> Any:
    """The coordinator of both servers. None: there is none yet."""
    with suppress(ValueError):
        return find_actor("servers-0", NAMESPACE)


@contextmanager
def both(path: str, owner: str) -> Iterator[tuple[LLM, Program]]:
    """Both servers. `owner`: which of them has created the coordinator, `this` or `the other`."""

    def start_late() -> Program:
        eventually(lambda: coordinator() is not None)
        return started(path)

    with ExitStack() as stack:
        if owner == "the other":
            other = stack.enter_context(started(path))
            eventually(lambda: coordinator() is not None)
            llm = stack.enter_context(LLM(path, data_parallel_rank=0, **OPTIONS))
        else:
            pool = stack.enter_context(ThreadPoolExecutor(1))
            starting = pool.submit(start_late)
            llm = stack.enter_context(LLM(path, data_parallel_rank=0, **OPTIONS))
            other = stack.enter_context(starting.result())
        yield llm, other


def num_ranks(ray: Any) -> int:
    """How many ranks there are, of both servers."""
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    return sum(re.search(r"_dp\d+(_\d+)?$", name) is not None for name in names)


def check(other: Program, expected: list[list[int]]) -> None:
    """Wait until the other server is up, and has its tokens."""
    eventually(lambda: "tokens [[" in other.output, lambda: other.output, 2 * LONG_S)
    (line,) = (line for line in other.output.splitlines() if line.startswith("tokens "))
    assert json.loads(line.removeprefix("tokens ")) == expected


@pytest.mark.timeout(400)
@pytest.mark.parametrize("owner", ["this", "the other"])
def test_servers_share_experts_and_a_lost_one_costs_the_other_no_request(ray_cluster, checkpoints, owner):
    path, expected = checkpoints["mixtral"]
    with both(path, owner) as (llm, other):
        check(other, expected)
        assert llm.collective_rpc(lambda worker: (worker.rank.ep_rank, worker.rank.ep_size)) == [(0, 2)]
        assert tokens(llm) == expected
        with pytest.raises(InvalidInput, match="share experts with those of other servers"):
            llm.sleep()
        with pytest.raises(InvalidConfig):
            llm.scale(2)
        first, before_loss = coordinator(), num_ranks(ray_cluster)
        with generating(llm, expected) as done:
            eventually(lambda: done)
            other.process.kill()
            eventually(lambda: llm.ranks[0].num_restarts == 1)
            before = len(done)
            eventually(lambda: len(done) > before + 1)
            assert llm.collective_rpc(lambda worker: worker.rank.ep_size) == [1]
            eventually(lambda: num_ranks(ray_cluster) == before_loss - 1, "the ranks of the lost server end")
            assert (coordinator() == first) == (owner == "this"), "another one takes the place of a lost coordinator"
            if owner == "this":
                with started(path) as again:
                    check(again, expected)
                    again.end_input()
                    assert again.wait_for_exit(60) == 0
                eventually(lambda: llm.ranks[0].num_restarts >= 3 and llm.ranks[0].state == "serving")
        assert tokens(llm) == expected
