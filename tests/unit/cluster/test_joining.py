"""What is said of Ray clusters that can't be joined. A gRPC server stands in for the cluster."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
from ray._private import services
from ray.core.generated import gcs_service_pb2 as messages
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from raycore.cluster import joining
from raycore.cluster.joining import Obstacle, find_obstacle

HOST = "127.0.0.1"
NODE_ID = bytes(28)


class FakeCluster:
    """Answers what a GCS is asked before a cluster is joined."""

    def __init__(self) -> None:
        self.version = ray.__version__
        self.nodes: list[list[GcsNodeInfo]] = []
        """The nodes at each question, of which the last one is asked again and again."""
        self.refuses = False

    def answer(self, request: bytes, context: grpc.ServicerContext, method: str) -> bytes:
        if self.refuses:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        if method == "CheckAlive":
            return messages.CheckAliveReply(ray_version=self.version).SerializeToString()
        nodes = self.nodes.pop(0) if len(self.nodes) > 1 else self.nodes[0]
        return messages.GetAllNodeInfoReply(node_info_list=nodes).SerializeToString()


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        method = handler_call_details.method.rpartition("/")[2]
        return grpc.unary_unary_rpc_method_handler(lambda *asked: self._cluster.answer(*asked, method))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS", "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(services, "resolve_ip_for_localhost", lambda host: host)
    monkeypatch.setattr(services, "find_node_ids", lambda: {NODE_ID.hex()}, raising=False)


@pytest.fixture
def cluster() -> Iterator[tuple[FakeCluster, str]]:
    fake = FakeCluster()
    server = grpc.server(ThreadPoolExecutor(1), handlers=[_Handler(fake)])
    port = server.add_insecure_port(f"{HOST}:0")
    server.start()
    yield fake, f"{HOST}:{port}"
    server.stop(None)


def node(socket_name: Path, address: str = HOST, state: int = GcsNodeInfo.ALIVE) -> GcsNodeInfo:
    return GcsNodeInfo(node_id=NODE_ID, raylet_socket_name=str(socket_name), node_manager_address=address, state=state)


def sockets_of(folder: Path) -> Path:
    return folder / "ray" / "session" / "sockets" / "raylet"


@pytest.fixture
def own_socket(tmp_path: Path) -> Path:
    path = sockets_of(tmp_path)
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_a_cluster_with_a_node_on_this_machine_can_be_joined(cluster: tuple[FakeCluster, str], own_socket: Path):
    fake, address = cluster
    fake.nodes = [[node(Path("/gone/raylet"), "203.0.113.77"), node(own_socket)]]
    assert find_obstacle(address, timeout_s=60.0) is None


def test_a_large_cluster_can_be_joined(cluster: tuple[FakeCluster, str], own_socket: Path):
    """Ray lists the last nodes that have ended, too. By default, gRPC refuses answers of over 4 MB."""
    fake, address = cluster
    ended = GcsNodeInfo(state=GcsNodeInfo.DEAD, node_manager_hostname="x" * 4096)
    fake.nodes = [[node(own_socket), *[ended] * 1100]]
    assert find_obstacle(address, timeout_s=60.0) is None


def test_a_node_that_registers_a_little_later_is_waited_for(cluster: tuple[FakeCluster, str], own_socket: Path):
    fake, address = cluster
    fake.nodes = [[], [node(own_socket)]]
    assert find_obstacle(address, timeout_s=60.0) is None


def asked_once(address: str, monkeypatch: pytest.MonkeyPatch) -> Obstacle | None:
    """What is found if there is no time to ask again."""
    monkeypatch.setattr(joining, "_RETRY_S", 1000.0)
    return find_obstacle(address, timeout_s=60.0)


def test_a_node_whose_sockets_this_process_does_not_see_is_named(
    cluster: tuple[FakeCluster, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake, address = cluster
    fake.nodes = [[node(sockets_of(tmp_path))]]
    obstacle = asked_once(address, monkeypatch)
    assert obstacle is not None
    assert obstacle.found.endswith(f"can't see its sockets, in {tmp_path / 'ray'}")
    assert f"mount the machine's {tmp_path / 'ray'}" in obstacle.remedy


def test_a_node_whose_process_this_process_does_not_see_is_named(
    cluster: tuple[FakeCluster, str], own_socket: Path, monkeypatch: pytest.MonkeyPatch
):
    fake, address = cluster
    fake.nodes = [[node(own_socket)]]
    monkeypatch.setattr(services, "find_node_ids", set, raising=False)
    obstacle = asked_once(address, monkeypatch)
    assert obstacle is not None
    assert obstacle.found.endswith("can't see its process")
    assert "share its process ids" in obstacle.remedy


def test_a_node_whose_sockets_lie_elsewhere_is_named(cluster: tuple[FakeCluster, str], monkeypatch: pytest.MonkeyPatch):
    fake, address = cluster
    fake.nodes = [[node(Path("/gone/raylet"))]]
    obstacle = asked_once(address, monkeypatch)
    assert obstacle is not None
    assert obstacle.found.endswith("can't see its sockets, in /")


def test_without_a_node_on_this_machine_those_of_the_cluster_are_named(
    cluster: tuple[FakeCluster, str], own_socket: Path, monkeypatch: pytest.MonkeyPatch
):
    fake, address = cluster
    fake.nodes = [[node(Path("/gone/raylet"), "203.0.113.77"), node(own_socket, state=GcsNodeInfo.DEAD)]]
    obstacle = asked_once(address, monkeypatch)
    assert obstacle is not None
    assert obstacle.found == "none of its nodes (203.0.113.77) runs on this machine"
    assert "ray job submit" in obstacle.remedy


def test_another_version_of_ray_is_named(cluster: tuple[FakeCluster, str]):
    fake, address = cluster
    fake.version = "2.1.0"
    obstacle = find_obstacle(address, timeout_s=60.0)
    assert obstacle is not None
    assert obstacle.found == f"it runs Ray 2.1.0, and this process Ray {ray.__version__}"


@pytest.mark.parametrize(
    ("environment", "found", "remedy"),
    [
        ({}, "it requires a token, and this process sends none", "RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0"}, "the token in RAY_AUTH_TOKEN isn't the cluster's", ""),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/t"}, "the token in RAY_AUTH_TOKEN_PATH=/t isn't", ""),
        ({"RAY_AUTH_MODE": "token"}, "the token in ~/.ray/auth_token isn't the cluster's", ""),
    ],
)
def test_a_refused_token_is_told_from_one_that_was_not_sent(
    cluster: tuple[FakeCluster, str],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    found: str,
    remedy: str,
):
    fake, address = cluster
    fake.refuses = True
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ray._private.authentication.authentication_utils.is_token_auth_enabled", lambda: False)
    obstacle = find_obstacle(address, timeout_s=60.0)
    assert obstacle is not None
    assert obstacle.found.startswith(found)
    assert remedy in obstacle.remedy
    assert not obstacle.is_gone


def test_a_missing_token_is_named_before_the_cluster_is_asked(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise ray.exceptions.AuthenticationError("a page of Ray's")

    monkeypatch.setattr("ray._private.grpc_utils.init_grpc_channel", refuse)
    obstacle = find_obstacle(f"{HOST}:1")
    assert obstacle is not None
    assert obstacle.found == "RAY_AUTH_MODE=token without a token"
    assert "RAY_AUTH_TOKEN" in obstacle.remedy
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/gone")
    assert "no token can be read from RAY_AUTH_TOKEN_PATH=/gone" in (find_obstacle(f"{HOST}:1") or Obstacle("")).found


@pytest.fixture
def listener() -> Iterator[Callable[[bytes], str]]:
    """Starts a server that sends the given bytes to each connection. Returns its address."""
    with socket.create_server((HOST, 0)) as server:

        def serve(greeting: bytes) -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(greeting)

        def start(greeting: bytes) -> str:
            if greeting:
                threading.Thread(target=serve, args=(greeting,), daemon=True).start()
            return f"{HOST}:{server.getsockname()[1]}"

        yield start
        server.shutdown(socket.SHUT_RDWR)


def test_a_port_on_which_no_process_listens(listener: Callable[[bytes], str]):
    with socket.socket() as bound:  # nobody else gets the port meanwhile
        bound.bind((HOST, 0))
        obstacle = find_obstacle(f"{HOST}:{bound.getsockname()[1]}")
    assert obstacle == Obstacle("no process listens on this port", is_gone=True)


@pytest.mark.parametrize(
    ("address", "found"),
    [("localhost", "no process listens on this port of 127.0.0.1"), ("auto", "no process listens at 127.0.0.1")],
)
def test_the_address_that_ray_takes_is_named(monkeypatch: pytest.MonkeyPatch, address: str, found: str):
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        port = bound.getsockname()[1]
        monkeypatch.setattr(services, "canonicalize_bootstrap_address", lambda address: f"{HOST}:{port}")
        obstacle = find_obstacle(address if address == "auto" else f"{address}:{port}")
    assert obstacle is not None
    assert obstacle.found == (f"{found}:{port}" if address == "auto" else found)


@pytest.mark.parametrize("greeting", [b"HTTP/1.0 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9\r\n"])
def test_another_service_is_told_from_ray(listener: Callable[[bytes], str], greeting: bytes):
    assert find_obstacle(listener(greeting)) == Obstacle("what listens on this port isn't Ray", is_gone=True)


def test_a_listener_that_never_answers_is_given_up(listener: Callable[[bytes], str]):
    obstacle = find_obstacle(listener(b""), timeout_s=0.3)
    assert obstacle is not None
    assert obstacle.found.startswith("no answer within 0.3 s")
    assert not obstacle.is_gone, "a busy cluster would be taken for one that is gone"


@pytest.mark.parametrize("address", ["head", "head:0", "head:x"])
def test_an_address_without_a_port_is_gone(address: str):
    obstacle = find_obstacle(address, timeout_s=60.0)
    assert obstacle is not None
    assert obstacle.is_gone
    assert obstacle.found.startswith(f"{address!r} isn't HOST:PORT")


def test_no_cluster_on_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert find_obstacle("auto") == Obstacle("Ray finds none on this machine", is_gone=True)


@pytest.mark.parametrize(
    ("code", "details", "found"),
    [
        ("UNAVAILABLE", "errors resolving head:6379: [field: address lookup failed]", "this host name is unknown"),
        ("UNAVAILABLE", "failed to connect; last error: ipv4:192.0.2.1:1: No route to host", "No route to host"),
        ("UNIMPLEMENTED", "", "what listens at head:6379 isn't Ray"),
        ("INTERNAL", "", "INTERNAL"),
    ],
)
def test_what_grpc_reports(code: str, details: str, found: str):
    assert joining._no_answer(code, details, "at head:6379", 4.0).found == found


def test_rays_messages_become_one_line():
    assert joining.in_one_line(RuntimeError("Version mismatch:\n    Ray: 2.1\n  Python: 3.9.\n")) == (
        "Version mismatch: Ray: 2.1 Python: 3.9"
    )
    assert joining.in_one_line(RuntimeError()) == "RuntimeError"


def test_an_address_of_this_machine_is_known():
    assert joining._is_own(HOST)
    assert not joining._is_own("203.0.113.77")
