"""API servers on all nodes of a cluster: also on one without ranks, on one that joins, and after a node has ended."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from chaos import server_on_node
from chaos.servers import expected_answers
from forked_ray import fork_server, nodes_with_forked_workers
from programs import Program, num_connections
from waiting import LONG_S, eventually

from raycore.cli.main import main
from raycore.demo import demo_model_path, held_out_problems
from raycore.node.ports import free_ports
from raycore.node.processes import is_running

NODE = {"object_store_memory": 80 << 20, "include_dashboard": False}
PROMPTS = [prompt for prompt, _ in held_out_problems(2, 12)]


@contextmanager
def two_nodes() -> Iterator[Any]:
    """A cluster: a node with CPUs, 127.0.0.2, on which the server is started, and one without, 127.0.0.3."""
    from ray.cluster_utils import Cluster

    with nodes_with_forked_workers(), fork_server(os.environ, "uvicorn"):  # pyright: ignore[reportArgumentType]
        cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 2, "node_ip_address": "127.0.0.2"})
        cluster.add_node(num_cpus=0, node_ip_address="127.0.0.3", **NODE)
        try:
            yield cluster
        finally:
            cluster.shutdown()


def pids(program: Program) -> dict[str, int]:
    """The process of the API server on each node that has ever had one."""
    found = re.findall(r"API server 0(?: on (\S+))? is serving \(pid (\d+)\)", program.output)
    return {ip or "127.0.0.2": int(pid) for ip, pid in found}


def client_of(program: Program, port: int, ip: str, stack: ExitStack) -> httpx.Client:
    """A client with a connection to the server of a node: all of them are on this machine, and share the port."""
    pid = pids(program)[ip]
    for _ in range(64):
        before = num_connections(pid, port)
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG_S, trust_env=False))
        assert client.get("/health").status_code == 200
        if num_connections(pid, port) > before:
            return client
    raise AssertionError(f"64 connections are all of other servers than {ip}'s")


def answers(client: httpx.Client) -> list[str]:
    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    return [ask(prompt) for prompt in PROMPTS]


@pytest.mark.timeout(300)
def test_each_node_has_a_server_of_the_engine_also_one_without_ranks_and_one_that_joins():
    (port,) = free_ports("127.0.0.1", 1)
    with two_nodes() as nodes:
        seen = answers_of_servers(nodes, port)
    assert seen == [expected_answers(PROMPTS)] * 4


def answers_of_servers(nodes: Any, port: int) -> list[list[str]]:
    """What the servers of both nodes answer, that of a third one that joins, and one of those that are left."""
    command = [sys.executable, str(Path(server_on_node.__file__)), nodes.address, "127.0.0.2"]
    model = ["--model", str(demo_model_path()), "--dtype", "float32", "--max-model-len", "256", "--num-threads", "1"]
    flags = ["--api-server-nodes", "all", "--host", "0.0.0.0", "--port", str(port)]
    with Program([*command, *model, *flags]) as program, ExitStack() as stack:
        program.wait_for("raycore: serving")
        assert set(pids(program)) == {"127.0.0.2", "127.0.0.3"}
        other = client_of(program, port, "127.0.0.3", stack)
        seen = [answers(other), answers(client_of(program, port, "127.0.0.2", stack))]
        counted = "vllm:request_success_total"

        def num_answered() -> float:
            lines = [line for line in other.get("/metrics").text.splitlines() if line.startswith(counted)]
            return sum(float(line.rpartition(" ")[2]) for line in lines)

        eventually(lambda: num_answered() == 2 * len(PROMPTS), "each server counts the requests of all")

        joins = nodes.add_node(num_cpus=0, node_ip_address="127.0.0.4", **NODE)
        eventually(lambda: "127.0.0.4" in pids(program), program.output)
        seen.append(answers(client_of(program, port, "127.0.0.4", stack)))

        ended = pids(program)["127.0.0.4"]
        nodes.remove_node(joins, allow_graceful=False)
        eventually(lambda: not is_running(ended), "a server ends with its node")
        seen.append(answers(client_of(program, port, "127.0.0.3", stack)))
        program.process.terminate()
        assert program.wait_for_exit(60) == 0
        assert not any(is_running(pid) for pid in pids(program).values())
    return seen


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "host=127.0.0.1 is an address of one node: give --host 0.0.0.0 or ::"),
        (["--uds", "/tmp/socket"], "the socket uds='/tmp/socket' is on one node: give a port"),
        (["--host", "::", "--port", "0"], "port=0 would be another port on each node: give a number"),
    ],
)
def test_addresses_that_cannot_be_of_all_nodes_are_refused(flags, named, capsys):
    assert main(["serve", "--api-server-nodes", "all", *flags]) == 1
    assert named in capsys.readouterr().err
