"""Several API servers on one port: `raycore serve --api-server-count 2`, its processes killed one by one."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from number_formats import DTYPE
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from programs import num_connections
from waiting import LONG_S, eventually

from raycore.control.commands import NAMESPACE
from raycore.control.remote import RemoteEngine
from raycore.errors import ControlError
from raycore.node.processes import is_running, wait_until_gone

NUM_STREAMS = 12
ENGINE = "two-servers"
PROMPT = [5, 6, 7, 8]
KEY = "secret"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


class Collector(ThreadingHTTPServer):
    """Takes spans, in OTLP over HTTP."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, ExportTraceServiceRequest]] = []
        """Each with the port that it came from, which is one process's."""
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}/v1/traces"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def services(self) -> list[dict[str, str]]:
        """What each process says of itself."""
        said = {
            port: {each.key: each.value.string_value for each in resource.resource.attributes}
            for port, request in self.requests
            for resource in request.resource_spans
        }
        return list(said.values())

    def spans(self, trace_id: str) -> list[tuple[int, str]]:
        """The port and the name of each span of a trace."""
        return [
            (port, span.name)
            for port, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.trace_id.hex() == trace_id
        ]


class CollectorHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # a process keeps its connection

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.requests.append((self.client_address[1], ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


class Program:
    """`raycore serve`, running."""

    def __init__(self, address: str, log: Path, collector: Collector) -> None:
        self.log = log
        arguments = ["--api-server-count", "2", "-dp", "2", "--port", "0", "--max-model-len", "1024", "--dtype", DTYPE]
        arguments += ["--num-threads", "1", "--otlp-traces-endpoint", collector.endpoint, "--enable-admin-endpoints"]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "raycore", "serve", *arguments, "--engine-name", ENGINE],
                env={
                    **os.environ,
                    "RAY_ADDRESS": address,
                    "RAYCORE_API_KEY": KEY,
                    "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=tests",
                },
                stderr=file,
            )
        wait_for("the program serves", lambda: "raycore: serving" in self.text or not self.is_running)
        assert self.is_running, self.text
        self.url = re.findall(r"on (http://\S+)", self.text)[0]
        self.port = int(self.url.rpartition(":")[2])

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def server_pids(self) -> list[int]:
        """Of all API servers that have ever served."""
        return [int(pid) for pid in re.findall(r"API server \d is serving \(pid (\d+)\)", self.text)]

    def live_servers(self) -> list[int]:
        return [pid for pid in self.server_pids if is_running(pid)]


@dataclass
class Stream:
    """One streamed completion, as its client sees it."""

    num_tokens: int
    trace_id: str = "0af7651916cd43dd8448eb211c80319c"
    num_events: int = 0
    response_id: str = ""
    num_completed: int | None = None
    """By the server's own count, at the end."""
    is_done: bool = False
    error: Exception | None = None
    finish_reasons: list[str] = field(default_factory=list)

    async def run(self, url: str) -> None:
        body = {"prompt": PROMPT, "max_tokens": self.num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        headers = {"traceparent": f"00-{self.trace_id}-b7ad6b7169203331-01", **AUTHORIZED}
        limits = httpx.Limits(max_keepalive_connections=0)
        try:
            async with (
                httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client,
                client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer,
            ):
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    self._take(line)
        except (httpx.HTTPError, OSError) as error:
            self.error = error

    def _take(self, line: str) -> None:
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.is_done = True
        elif data:
            event = json.loads(data)
            assert "error" not in event, event
            self.num_events += 1
            self.response_id = event["id"]
            self.finish_reasons += [choice["finish_reason"] for choice in event["choices"] if choice["finish_reason"]]
            if event["usage"]:
                self.num_completed = event["usage"]["completion_tokens"]

    @property
    def is_whole(self) -> bool:
        return self.is_done and self.num_completed == self.num_tokens and self.finish_reasons == ["length"]


def wait_for(what: str, is_so: Callable[[], bool]) -> None:
    eventually(is_so, f"it didn't come about: {what}")


async def until(what: str, is_so: Callable[[], bool]) -> None:
    await asyncio.get_running_loop().run_in_executor(None, wait_for, what, is_so)


def a_client_of_each(program: Program, clients: ExitStack) -> list[httpx.Client]:
    """A client for each process that serves, with a connection to it."""
    found: dict[int, httpx.Client] = {}
    pids = program.live_servers()
    for _ in range(64):
        before = {pid: num_connections(pid, program.port) for pid in pids}
        client = clients.enter_context(
            httpx.Client(base_url=program.url, headers=AUTHORIZED, timeout=60, trust_env=False)
        )
        assert client.get("/health").status_code == 200
        (pid,) = (pid for pid in pids if num_connections(pid, program.port) > before[pid])
        found.setdefault(pid, client)
        if len(found) == len(pids):
            return list(found.values())
    raise AssertionError(f"64 connections are all of {list(found)}")


def told(program: Program, metric: str = "vllm:generation_tokens_total") -> set[int]:
    """A metric's samples added up, as several connections see them: the generated tokens, if it isn't said."""
    pages = [httpx.get(f"{program.url}/metrics", trust_env=False).text for _ in range(6)]
    return {sum(int(float(n)) for n in re.findall(rf"^{metric}.* (\S+)$", page, re.M)) for page in pages}


def loads(ray) -> int:
    """Requests that the ranks themselves have, all together."""
    names = ray.util.list_named_actors(all_namespaces=True)
    ranks = [ray.get_actor(each["name"], each["namespace"]) for each in names if re.search(r"_dp\d", each["name"])]
    found = ray.get([rank.utility.remote("load", (), {}, 10.0) for rank in ranks], timeout=20)
    return sum(load.num_running + load.num_waiting for load in found)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector
        collector.shutdown()


@pytest.fixture(scope="module")
def program(address, collector, tmp_path_factory) -> Iterator[Program]:
    program = Program(address, tmp_path_factory.mktemp("serve") / "log", collector)
    yield program
    if program.is_running:
        program.process.kill()
        program.process.wait(LONG_S)


@pytest.fixture(scope="module")
def remote(ray_cluster, program) -> RemoteEngine:
    """The engine, seen from outside."""

    def is_there() -> bool:
        return any(name["namespace"] == NAMESPACE for name in ray_cluster.util.list_named_actors(all_namespaces=True))

    def is_known() -> bool:
        try:
            return bool(remote.status()[0].ranks)
        except ControlError:
            return False  # it is only just there

    wait_for("the engine can be reached", is_there)
    remote = RemoteEngine(ENGINE)
    wait_for("the engine has said how it is", is_known)
    return remote


def test_both_api_servers_serve_and_the_driver_counts_the_requests_of_both(program, remote):
    streams: list[Stream] = []
    is_known = asyncio.Event()

    async def keep_streaming() -> None:
        # one answer may be over before word of it has come round
        while not is_known.is_set():
            streams.append(stream := Stream(300))
            await stream.run(program.url)

    async def run() -> None:
        tasks = [asyncio.ensure_future(keep_streaming()) for _ in range(NUM_STREAMS)]
        await until(
            "both have connections", lambda: all(num_connections(pid, program.port) for pid in program.server_pids)
        )
        await until(
            "the program hears of it",
            lambda: sum(rank.num_running for rank in remote.status()[0].ranks) > NUM_STREAMS // 2,
        )
        is_known.set()
        await asyncio.gather(*tasks)
        assert all(stream.is_whole for stream in streams), streams
        await until("either shows what both have done", lambda: told(program) == {len(streams) * 300})
        answered = 'http_requests_total{handler="/v1/completions"'
        await until("either counts what both were asked", lambda: told(program, answered) == {len(streams)})
        await until(
            "the program hears of the end", lambda: not any(rank.num_running for rank in remote.status()[0].ranks)
        )

    assert len(program.server_pids) == 2
    asyncio.run(run())


def test_a_killed_api_server_ends_only_its_own_streams_and_is_replaced(program, ray_cluster):
    async def run() -> None:
        streams = [Stream(900) for _ in range(NUM_STREAMS)]
        tasks = [asyncio.ensure_future(stream.run(program.url)) for stream in streams]
        await until(
            "both have connections", lambda: all(num_connections(pid, program.port) for pid in program.live_servers())
        )
        await until("all streams have begun", lambda: all(stream.num_events for stream in streams))
        victim = program.live_servers()[0]
        os.kill(victim, signal.SIGKILL)
        await until("its streams break", lambda: any(stream.error for stream in streams))

        def survivors() -> list[Stream]:
            return [stream for stream in streams if not stream.error]

        # what the ranks still have is the survivors', while these run
        await until("the ranks drop its requests", lambda: loads(ray_cluster) <= len(survivors()))
        assert not all(stream.is_done for stream in survivors()), "a test of nothing: the requests had all finished"
        await asyncio.gather(*tasks)
        assert survivors(), "a test of nothing: no stream was the other server's"
        assert all(stream.is_whole for stream in survivors()), survivors()

    asyncio.run(run())
    wait_for("another takes its place", lambda: len(program.live_servers()) == 2)
    assert loads(ray_cluster) == 0
    for _ in range(8):
        assert httpx.get(f"{program.url}/health", trust_env=False).status_code == 200


def test_a_killed_rank_ends_no_stream_of_any_api_server(program, remote):
    async def run() -> None:
        streams = [Stream(400) for _ in range(NUM_STREAMS)]
        tasks = [asyncio.ensure_future(stream.run(program.url)) for stream in streams]
        await until("all streams have begun", lambda: all(stream.num_events for stream in streams))
        pid = remote.status()[0].ranks[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
        assert [stream.is_whole for stream in streams] == [True] * NUM_STREAMS, streams

    asyncio.run(run())

    def serves_again() -> bool:
        # the status may be a second old, and from before the rank was lost
        ranks = remote.status()[0].ranks
        return all(rank.state == "serving" for rank in ranks) and ranks[1].num_restarts == 1

    wait_for("the rank is back", serves_again)


def test_each_api_server_can_pause_the_engine_for_all_api_servers(program, remote):
    async def run() -> None:
        async with httpx.AsyncClient(base_url=program.url, headers=AUTHORIZED, timeout=60, trust_env=False) as client:

            async def ask(method: str, path: str) -> Any:
                # a connection of its own, so that either server may get it
                answer = await client.request(method, path, headers={"Connection": "close"})
                assert answer.status_code == 200, answer.text
                return answer.json()

            def start(count: int, num_tokens: int) -> tuple[list[Stream], list[asyncio.Future[None]]]:
                streams = [Stream(num_tokens) for _ in range(count)]
                return streams, [asyncio.ensure_future(stream.run(program.url)) for stream in streams]

            streams, tasks = start(NUM_STREAMS, 900)
            await until("all streams have begun", lambda: all(stream.num_events for stream in streams))
            assert await ask("POST", "/pause?mode=keep") == {"status": "paused"}
            await asyncio.sleep(0.2)  # what servers have sent is on its way
            before = [stream.num_events for stream in streams]
            later, later_tasks = start(4, 30)
            assert [await ask("GET", "/is_paused") for _ in range(6)] == [{"is_paused": True}] * 6
            await until("the status says it", lambda: {rank.state for rank in remote.status()[0].ranks} == {"paused"})
            assert [stream.num_events for stream in streams] == before
            assert not any(stream.num_events for stream in later)
            assert not all(stream.is_done for stream in streams), "a test of nothing: the requests had all finished"
            assert await ask("POST", "/resume") == {"status": "resumed"}
            await asyncio.gather(*tasks, *later_tasks)
            assert all(stream.is_whole for stream in streams + later), streams + later

            streams, tasks = start(NUM_STREAMS, 900)
            await until("all streams have begun", lambda: all(stream.num_events for stream in streams))
            assert await ask("POST", "/sleep?level=2") == {"status": "sleeping", "level": 2}
            await asyncio.gather(*tasks)
            assert all(stream.finish_reasons == ["abort"] and stream.is_done for stream in streams), streams
            later, later_tasks = start(4, 30)
            answer = await client.post("/resume")
            assert (answer.status_code, "wake_up()" in answer.text) == (400, True)
            await until("the status says it", lambda: {rank.state for rank in remote.status()[0].ranks} == {"asleep"})
            assert await ask("POST", "/wake_up?tags=weights") == {"status": "sleeping", "tags": ["weights"]}
            assert await ask("POST", "/wake_up") == {"status": "awake", "tags": None}
            await asyncio.gather(*later_tasks)
            assert all(stream.is_whole for stream in later), later
            assert await ask("POST", "/reset_prefix_cache") == {"success": True}

    asyncio.run(run())


def test_each_api_server_aborts_the_requests_of_all_api_servers(program):
    async def run() -> None:
        streams = [Stream(900) for _ in range(NUM_STREAMS)]
        tasks = [asyncio.ensure_future(stream.run(program.url)) for stream in streams]
        await until("all streams have begun", lambda: all(stream.num_events for stream in streams))
        await until(
            "both have connections", lambda: all(num_connections(pid, program.port) for pid in program.live_servers())
        )
        ids = [stream.response_id for stream in streams]
        async with httpx.AsyncClient(base_url=program.url, headers=AUTHORIZED, timeout=60, trust_env=False) as client:
            one = await client.post("/abort_requests", json={"request_ids": ids[:1]})
            some = await client.post("/abort_requests", json={"request_ids": ids})
            rest = await client.post("/abort_requests", json={})
        assert [answer.json()["aborted"] for answer in (one, some, rest)] == [1, NUM_STREAMS - 1, 0]
        await asyncio.gather(*tasks)
        assert all(stream.finish_reasons == ["abort"] and stream.is_done for stream in streams), streams

    asyncio.run(run())


def test_what_one_api_server_stores_of_responses_the_others_have_too(program):
    ask = {"input": "27 + 58 =", "max_output_tokens": 5, "temperature": 0}
    with ExitStack() as clients:
        one, other = a_client_of_each(program, clients)
        first = one.post("/v1/responses", json=ask).json()
        path = f"/v1/responses/{first['id']}"
        assert other.get(path).json() == one.get(path).json() == first
        later = other.post("/v1/responses", json={**ask, "previous_response_id": first["id"]}).json()
        assert later["previous_response_id"] == first["id"]
        items = one.get(f"/v1/responses/{later['id']}/input_items", params={"order": "asc"}).json()["data"]
        assert [item["role"] for item in items] == ["user", "assistant", "user"]
        long = {**ask, "max_output_tokens": 900, "ignore_eos": True, "background": True}
        running = one.post("/v1/responses", json=long).json()
        assert running["status"] in ("queued", "in_progress")
        cancelled = f"/v1/responses/{running['id']}"
        assert other.post(f"{cancelled}/cancel").json()["status"] == "cancelled"
        assert [each.get(cancelled).json()["status"] for each in (one, other)] == ["cancelled"] * 2
        wait_for("its request has ended", lambda: told(program, "vllm:num_requests_running") == {0})
        assert other.delete(path).json()["deleted"]
        assert [each.get(path).status_code for each in (one, other)] == [404, 404]


def test_a_taken_port_is_refused_before_anything_starts(program):
    run = subprocess.run(
        [sys.executable, "-m", "raycore", "serve", "--api-server-count", "2", "--port", str(program.port)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode != 0
    assert f"can't listen on 127.0.0.1:{program.port}: Address already in use" in run.stderr


def test_sigterm_lets_streams_finish_exports_their_traces_and_leaves_no_process(program, remote, collector):
    """The last of this module: it ends the program."""
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    pids = [*program.live_servers(), *(rank.pid for rank in remote.status()[0].ranks if rank.pid is not None)]

    async def run() -> None:
        streams = [Stream(400, trace_id) for _ in range(NUM_STREAMS)]
        tasks = [asyncio.ensure_future(stream.run(program.url)) for stream in streams]
        await until("all streams have begun", lambda: all(stream.num_events for stream in streams))
        program.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*tasks)
        assert [stream.is_whole for stream in streams] == [True] * NUM_STREAMS, streams

    asyncio.run(run())
    assert program.process.wait(LONG_S) == 0, program.text
    assert "ended by SIGTERM" in program.text
    assert wait_until_gone(pids, 5.0) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{program.url}/health", trust_env=False)
    spans = collector.spans(trace_id)
    names = Counter(name for _, name in spans)
    assert {names[name] for name in ("POST /v1/completions", "generate", "queue", "prefill", "decode")} == {NUM_STREAMS}
    assert names["worker step"] > NUM_STREAMS
    assert len({port for port, _ in spans}) == 2, "each server sends its own"
    services = collector.services()
    assert len(services) >= 2
    for each in services:
        assert (each["service.name"], each["deployment.environment"]) == ("raycore", "tests")
