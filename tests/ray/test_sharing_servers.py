"""Two servers whose ranks share experts: the reference tokens from both, one that is killed, and one that returns."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import sharing_server
from programs import Program
from sharing_server import OPTIONS, tokens
from waiting import eventually

from raycore import LLM
from raycore.errors import InvalidConfig, InvalidInput
from raycore.ray_api import cluster_address

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


def check(other: Program, expected: list[list[int]]) -> None:
    """Wait until the other server is up, and has its tokens."""
    other.wait_for("tokens [[")
    (line,) = (line for line in other.output.splitlines() if line.startswith("tokens "))
    assert json.loads(line.removeprefix("tokens ")) == expected


@pytest.mark.timeout(400)
def test_servers_share_experts_and_a_lost_one_costs_the_other_no_request(ray_cluster, checkpoints):
    path, expected = checkpoints["mixtral"]
    with started(path) as other, LLM(path, data_parallel_rank=0, **OPTIONS) as llm:
        check(other, expected)
        assert llm.collective_rpc(lambda worker: (worker.rank.ep_rank, worker.rank.ep_size)) == [(0, 2)]
        assert tokens(llm) == expected
        with pytest.raises(InvalidInput, match="share experts with those of other servers"):
            llm.sleep()
        with pytest.raises(InvalidConfig):
            llm.scale(2)
        with generating(llm, expected) as done:
            eventually(lambda: done)
            other.process.kill()
            eventually(lambda: llm.ranks[0].num_restarts == 1)
            before = len(done)
            eventually(lambda: len(done) > before + 1)
            assert llm.collective_rpc(lambda worker: worker.rank.ep_size) == [1]
            with started(path) as again:
                check(again, expected)
                again.end_input()
                assert again.wait_for_exit(60) == 0
            eventually(lambda: llm.ranks[0].num_restarts >= 3 and llm.ranks[0].state == "serving")
        assert tokens(llm) == expected
