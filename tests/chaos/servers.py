"""Several servers that divide the ranks of a deployment, one on each of three simulated nodes, and a node that is lost.

Requests go to the servers in turn, as a simple load balancer would send them. In the middle, a node is killed, with its
Ray processes, its ranks and its server. A request that gets no answer goes to the next server. Every answer has to be
that of an engine with one rank.

    python -m tests.chaos.servers --mode hybrid        two ranks on each node
    python -m tests.chaos.servers --mode external      a server for each rank

Prints who answered what, before and after the loss. The exit status is 1 if a request was lost, or an answer differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from common import table

from raycore import LLM, SamplingParams
from raycore.demo import demo_model_path, held_out_problems
from raycore.node.ports import free_ports

START_S = 180.0
ANSWER_S = 60.0
_TOKENS = 24


@dataclass
class Server:
    """A server on a node of its own."""

    node: Any
    ip: str
    port: int
    process: subprocess.Popen[bytes]
    answered: Counter[str] = field(default_factory=Counter[str])
    """How many requests, by `before` and `after` the loss."""
    refused: int = 0
    """How many requests went on to another server."""

    @property
    def url(self) -> str:
        """The beginning of its addresses."""
        return f"http://127.0.0.1:{self.port}"


class Deployment:
    """Servers that divide the ranks. End it with `close()`."""

    def __init__(self, num_nodes: int, ranks_each: int, flags: Sequence[str] = ()) -> None:
        """
        Args:
            ranks_each: of a server. 1: external load balancing. More: hybrid.
        """
        from ray.cluster_utils import Cluster

        options = {"object_store_memory": 80 << 20, "include_dashboard": False}
        # the other servers' nodes have CPUs left, so that only a server's options keep its ranks on its own
        self._cluster = Cluster(initialize_head=True, head_node_args=options | {"num_cpus": 0})
        self.servers: list[Server] = []
        total = num_nodes * ranks_each
        for index, port in enumerate(free_ports("127.0.0.1", num_nodes)):
            ip = f"127.0.0.{index + 2}"
            node = self._cluster.add_node(node_ip_address=ip, num_cpus=4 * ranks_each, **options)
            part = (
                ["--data-parallel-rank", str(index)]
                if ranks_each == 1
                else [
                    *("--data-parallel-hybrid-lb", "--data-parallel-size-local", str(ranks_each)),
                    *("--data-parallel-start-rank", str(index * ranks_each)),
                ]
            )
            command = [sys.executable, str(Path(__file__).with_name("server_on_node.py")), self._cluster.address, ip]
            model = ["--model", str(demo_model_path()), "--dtype", "float32", "--max-model-len", "256"]
            listen = ["--port", str(port), "--num-threads", "1", "--data-parallel-size", str(total)]
            process = subprocess.Popen([*command, *model, *listen, *part, *flags], start_new_session=True)
            self.servers.append(Server(node, ip, port, process))
        self._wait()

    def _wait(self) -> None:
        deadline_s = time.monotonic() + START_S
        for server in self.servers:
            while not self._is_up(server):
                assert time.monotonic() < deadline_s, f"the server on {server.ip} hasn't started"
                assert server.process.poll() is None, f"the server on {server.ip} has ended"
                time.sleep(0.2)

    @staticmethod
    def _is_up(server: Server) -> bool:
        with suppress(OSError):
            return urllib.request.urlopen(f"{server.url}/health", timeout=5).status == 200
        return False

    @property
    def address(self) -> str:
        """The address of the Ray cluster."""
        return self._cluster.address

    def kill_node(self, index: int) -> None:
        """Kill a node: its Ray processes, with the ranks that they have started, and its server."""
        server = self.servers[index]
        os.kill(server.process.pid, signal.SIGKILL)
        self._cluster.remove_node(server.node, allow_graceful=False)

    def ranks(self) -> dict[str, set[str]]:
        """By server, the numbers of its ranks, as its metrics have them."""
        return {server.ip: self._ranks_of(server) for server in self.servers if server.process.poll() is None}

    @staticmethod
    def _ranks_of(server: Server) -> set[str]:
        text = urllib.request.urlopen(f"{server.url}/metrics", timeout=ANSWER_S).read().decode()
        lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
        return {line.partition('engine="')[2].partition('"')[0] for line in lines}

    def close(self) -> None:
        """End the servers and the cluster."""
        for server in self.servers:
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
        for server in self.servers:
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(60)
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait(10)
        self._cluster.shutdown()


class Balancer:
    """Sends each request to the next server, and to another one if that gives no answer."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self.phase = "before"

    def ask(self, index: int, prompt: str) -> str | None:
        """The answer to a request. None: no server gave one."""
        for attempt in range(len(self._servers)):
            server = self._servers[(index + attempt) % len(self._servers)]
            phase = self.phase
            try:
                text = _complete(server, prompt)
            except OSError:
                server.refused += 1
                continue
            server.answered[phase] += 1
            return text
        return None


def _complete(server: Server, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        answer = urllib.request.urlopen(request, timeout=ANSWER_S).read()
    except HTTPException as error:  # the connection broke in the middle of an answer
        raise ConnectionError(str(error)) from error
    return json.loads(answer)["choices"][0]["text"]


def expected_answers(prompts: Sequence[str]) -> list[str]:
    """The answers of an engine with one rank."""
    with LLM(demo_model_path(), dtype="float32", max_model_len=256, num_threads=1, use_tqdm_on_load=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
        return [output.outputs[0].text for output in llm.generate(list(prompts), params, use_tqdm=False)]


def lose_a_node(deployment: Deployment, prompts: Sequence[str], concurrency: int, lost: int) -> list[str | None]:
    """The answers to all requests, while the node `lost` is killed in the middle."""
    balancer = Balancer(deployment.servers)
    done = threading.Semaphore(0)

    def ask(index: int) -> str | None:
        answer = balancer.ask(index, prompts[index])
        done.release()
        return answer

    with ThreadPoolExecutor(concurrency) as pool:
        asked = [pool.submit(ask, index) for index in range(len(prompts))]
        for _ in range(len(prompts) // 3):
            done.acquire()
        deployment.kill_node(lost)
        balancer.phase = "after"
        return [each.result() for each in asked]


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["hybrid", "external"], default="hybrid")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--concurrency", type=int, default=12)
    args = parser.parse_args()
    prompts = [prompt for prompt, _ in held_out_problems(2, args.requests)]
    expected = expected_answers(prompts)
    deployment = Deployment(3, 2 if args.mode == "hybrid" else 1)
    try:
        ranks = deployment.ranks()
        answers = lose_a_node(deployment, prompts, args.concurrency, lost=1)
    finally:
        deployment.close()
    rows: list[list[object]] = [["server", "its ranks", "answered before", "answered after", "went on to another"]]
    rows += [
        [each.ip, " ".join(sorted(ranks[each.ip])), each.answered["before"], each.answered["after"], each.refused]
        for each in deployment.servers
    ]
    num_lost = sum(answer is None for answer in answers)
    num_differing = sum(answer not in (None, text) for answer, text in zip(answers, expected, strict=True))
    print(table(rows))
    print(f"{args.mode}: node 127.0.0.3 was killed; {len(prompts)} requests, {num_lost} lost, {num_differing} differ")
    sys.exit(bool(num_lost or num_differing))


if __name__ == "__main__":
    main()
