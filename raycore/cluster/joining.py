"""Finds out why this process can't join a Ray cluster, before Ray is asked to.

Ray itself retries for a minute and longer, logs lines of its own meanwhile, and handles no signal. It aborts the
program if it can't reach the cluster's node on this machine.
"""

# protobuf's and grpc's types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingModuleSource=false

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import ray

from raycore.node.ports import parse_address
from raycore.system import os, socket, time

_ANSWER_S = 3.5
"""How long to wait for a cluster's answers, in seconds. They normally take milliseconds."""

_RETRY_S = 0.2
_CHANNEL = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1))
"""The list of a large cluster's nodes is longer than gRPC's limit of 4 MB."""

_SERVICE = "/ray.rpc.NodeInfoGcsService"
_ON_A_NODE = "Run this program on a node of the cluster, as `ray job submit -- python ...` does"


class Obstacle(NamedTuple):
    """Why a cluster can't be joined."""

    found: str
    """What is wrong, as a clause."""
    remedy: str = ""
    """What to do about it, as a sentence. Empty: check the address."""
    is_gone: bool = False
    """Whether no Ray cluster can be there."""

    def message(self, source: str, remedy: str) -> str:
        """The message for users. `source`: what names the cluster. `remedy`: what to do if the address is wrong."""
        return f"{source} can't be joined: {self.found}. {self.remedy or remedy}"


def find_obstacle(address: str, timeout_s: float = _ANSWER_S) -> Obstacle | None:
    """Ask the cluster at `address` whether this process can join it. None: it can.

    `address`: `host:port`, or `auto` for the one that Ray finds on this machine. Sends the token that Ray itself would
    send. Answers within `timeout_s` seconds, and signals end the wait.
    """
    # imported lazily: only programs that join a cluster need them
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.exceptions import AuthenticationError

    try:
        target = address_for_ray(address)
    except (ConnectionError, ValueError) as error:
        return Obstacle(str(error), is_gone=True)
    deadline_s = time.monotonic() + timeout_s
    try:
        with closing(init_grpc_channel(target, _CHANNEL)) as channel:
            obstacle = _of_version(_ask(channel, "CheckAlive", deadline_s))
            if obstacle is not None:
                return obstacle
            while (obstacle := _of_nodes(_ask(channel, "GetAllNodeInfo", deadline_s).node_info_list)) is not None:
                if time.monotonic() + _RETRY_S > deadline_s:
                    return obstacle
                time.sleep(_RETRY_S)  # a node that has just started may not have registered yet
            return None
    except AuthenticationError:
        return no_token()
    except grpc.RpcError as error:
        answer: Any = error
        if answer.code() is grpc.StatusCode.UNAUTHENTICATED:
            return _refused_token()
        # Ray takes this machine's address for localhost
        place = "on this port" if target == address else f"on this port of {target.rpartition(':')[0]}"
        place = f"at {target}" if address == "auto" else place
        return _no_answer(answer.code().name, str(answer.details()), place, timeout_s)
    except (RuntimeError, OSError) as error:  # of the files for TLS
        return Obstacle(in_one_line(error))


def address_for_ray(address: str) -> str:
    """The `host:port` at which Ray would join `address`, which may be `auto`, too.

    Raises:
        ConnectionError: `auto`, and Ray finds no cluster on this machine.
        ValueError: the address is neither.
    """
    from ray._private.services import canonicalize_bootstrap_address

    if address != "auto":
        parse_address(address)
    try:
        return canonicalize_bootstrap_address(address) or address
    except ConnectionError:
        raise ConnectionError("Ray finds none on this machine") from None


def in_one_line(error: Exception) -> str:
    """The message of an error of Ray's, without line breaks and a full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _ask(channel: Any, method: str, deadline_s: float) -> Any:
    from ray.core.generated import gcs_service_pb2 as messages

    call = channel.unary_unary(
        f"{_SERVICE}/{method}",
        request_serializer=getattr(messages, f"{method}Request").SerializeToString,
        response_deserializer=getattr(messages, f"{method}Reply").FromString,
    )
    return call(getattr(messages, f"{method}Request")(), timeout=max(_RETRY_S, deadline_s - time.monotonic()))


def _of_version(alive: Any) -> Obstacle | None:
    if alive.ray_version in ("", ray.__version__):
        return None
    return Obstacle(
        f"it runs Ray {alive.ray_version}, and this process Ray {ray.__version__}",
        "Install the same version in both",
    )


def _of_nodes(nodes: Sequence[Any]) -> Obstacle | None:
    """Why none of a cluster's nodes can be used, each of which has a `raylet_socket_name` on its own machine."""
    from ray._private import services

    alive = [node for node in nodes if node.state == type(node).ALIVE]
    here = [node for node in alive if _can_be_here(node.raylet_socket_name)]
    processes: Any = getattr(services, "find_node_ids", None)  # a Ray without it takes any node of this machine
    if here and (processes is None or not processes().isdisjoint(node.node_id.hex() for node in here)):
        return None
    for node in alive:
        if _is_own(node.node_manager_address):
            *_, folder = islice(Path(node.raylet_socket_name).parents, 3)
            hidden = "its process" if here else f"its sockets, in {folder}"
            return Obstacle(
                f"it has a node on this machine, but this process can't see {hidden}",
                f"{_ON_A_NODE}. In a container, mount the machine's {folder} and share its process ids",
            )
    if not alive:
        return Obstacle("it has no node that is alive", "Check its raylets, or start a node with `ray start`")
    where = sorted({node.node_manager_address for node in alive})
    listed = ", ".join([*where[:3], "…"] if len(where) > 3 else where)
    return Obstacle(f"none of its nodes ({listed}) runs on this machine", _ON_A_NODE)


def _can_be_here(raylet_socket_name: str) -> bool:
    return os.path.exists(raylet_socket_name) or not raylet_socket_name.startswith("/")


def _is_own(address: str) -> bool:
    """Whether an IP address is this machine's."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def no_token() -> Obstacle:
    """What it means that Ray raises AuthenticationError."""
    file = os.environ.get("RAY_AUTH_TOKEN_PATH")
    found = f"no token can be read from RAY_AUTH_TOKEN_PATH={file}" if file else "RAY_AUTH_MODE=token without a token"
    return Obstacle(
        found,
        "Set RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH to a file with it",
    )


def _refused_token() -> Obstacle:
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return Obstacle(
            "it requires a token, and this process sends none",
            "Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the cluster's token",
        )
    own = "in ~/.ray/auth_token"
    if file := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        own = f"in RAY_AUTH_TOKEN_PATH={file}"
    if os.environ.get("RAY_AUTH_TOKEN"):
        own = "in RAY_AUTH_TOKEN"
    return Obstacle(f"the token {own} isn't the cluster's", "Set RAY_AUTH_TOKEN to the cluster's token")


def _no_answer(code: str, details: str, place: str, timeout_s: float) -> Obstacle:
    """What it means that gRPC reports this of a call."""
    if code == "DEADLINE_EXCEEDED":
        return Obstacle(f"no answer within {timeout_s:g} s: it hangs, or the network drops what is sent there")
    if "Connection refused" in details:
        return Obstacle(f"no process listens {place}", is_gone=True)
    if "errors resolving" in details or "lookup failed" in details:
        return Obstacle("this host name is unknown", is_gone=True)
    if code == "UNIMPLEMENTED" or "HTTP/2" in details:
        return Obstacle(f"what listens {place} isn't Ray", is_gone=True)
    return Obstacle(details.rpartition(": ")[2] or code)
