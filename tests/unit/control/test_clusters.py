"""Which engine `raycore status` and `raycore scale` mean, and where they look for it."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray.exceptions import RayError

from raycore.cluster.joining import Obstacle
from raycore.control import clusters
from raycore.control.clusters import clusters_to_search, connected
from raycore.control.remote import choose_engine
from raycore.errors import ControlError
from raycore.status import FoundEngine

CHAT, SUMS = FoundEngine("10.0.0.1:6379", "chat"), FoundEngine("10.0.0.1:6379", "sums")
OTHER_CHAT = FoundEngine("10.0.0.1:7000", "chat")
WHERE = "in the Ray clusters of this machine, at 10.0.0.1:6379, 10.0.0.1:7000"


def choose(found: list[FoundEngine], wanted: str | None) -> FoundEngine:
    return choose_engine(found, wanted, WHERE, "raycore scale -dp 2")


def test_the_only_running_engine_is_chosen_without_a_name() -> None:
    assert choose([CHAT], None) == CHAT
    assert choose([CHAT, SUMS], "sums") == SUMS


@pytest.mark.parametrize(
    ("found", "wanted", "said", "listed"),
    [
        ([], None, f"no engine runs {WHERE}; ", []),
        ([], "chat", f"no engine runs {WHERE}; ", []),
        ([CHAT, SUMS], None, f"2 engines run {WHERE}. Choose one:", [CHAT, SUMS]),
        ([CHAT, SUMS, OTHER_CHAT], "chat", f"2 engines run {WHERE}. Choose one:", [CHAT, OTHER_CHAT]),
        ([CHAT], "cats", f"no engine 'cats' runs {WHERE}, but others do. Choose one:", [CHAT]),
    ],
)
def test_an_ambiguous_engine_is_refused_with_the_commands_to_type(
    found: list[FoundEngine], wanted: str | None, said: str, listed: list[FoundEngine]
) -> None:
    with pytest.raises(ControlError) as raised:
        choose(found, wanted)
    first, *rest = str(raised.value).splitlines()
    assert first.startswith(said)
    assert rest == [f"  raycore scale -dp 2 --address {each.address} --name {each.name}" for each in listed]


def _find_obstacle(address: str, timeout_s: float) -> Obstacle | None:
    return {"10.0.0.1:1": Obstacle("refused", is_gone=True), "10.0.0.1:6379": Obstacle("a token")}.get(address)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two Rays of this user, of which one is on two nodes, and one that has crashed."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(clusters, "find_obstacle", _find_obstacle)
    commands = [
        ["/ray/gcs/gcs_server", "--gcs_server_port=6379"],
        ["/ray/raylet/raylet", "--gcs-address=10.0.0.1:6379", "--node-ip-address=10.0.0.1"],
        ["/ray/raylet/raylet", "--gcs-address=10.0.0.1:7000"],
        ["/ray/raylet/raylet", "--gcs-address=10.0.0.1:7000"],
        ["/ray/raylet/raylet", "--gcs-address=10.0.0.1:1"],
        ["python", "default_worker.py", "--gcs-address=10.0.0.1:9000"],
        [],
    ]
    for pid, command in enumerate(commands, 1):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes("\0".join(command).encode())
    return tmp_path


def test_all_clusters_of_this_user_on_this_machine_are_searched(proc: Path) -> None:
    assert clusters_to_search("auto", proc) == ["10.0.0.1:6379", "10.0.0.1:7000"]


def test_clusters_of_other_users_are_not_searched(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid() + 1
    monkeypatch.setattr("os.getuid", lambda: uid)
    assert clusters_to_search("auto", proc) == ["auto"]


@pytest.mark.parametrize(("address", "environment"), [("10.0.0.9:1", ""), ("auto", "10.0.0.9:1")])
def test_only_the_named_cluster_is_searched(
    address: str, environment: str, proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", environment)
    assert clusters_to_search(address, proc) == ["10.0.0.9:1"]


def test_the_token_of_a_ray_without_a_home_is_that_of_its_process(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (proc / "3" / "environ").write_bytes(b"HOME=/\0RAY_AUTH_TOKEN=abc\0")
    found = clusters._clusters_here(proc)
    assert found["10.0.0.1:6379"] == ""
    assert found["10.0.0.1:7000"] == "abc"


@pytest.mark.parametrize(
    ("address", "environment", "obstacle", "said"),
    [
        (
            "10.0.0.9:1",
            "",
            Obstacle("refused", is_gone=True),
            "no Ray cluster at address '10.0.0.9:1': refused. Run this on a node of the engine's cluster, or name it "
            "with --address HOST:PORT",
        ),
        (
            "10.0.0.9:1",
            "10.0.0.9:1",
            Obstacle("refused", is_gone=True),
            "no Ray cluster at address '10.0.0.9:1': refused. RAY_ADDRESS=10.0.0.9:1 names it: set it to the engine's "
            "cluster, or give --address HOST:PORT",
        ),
        (
            "10.0.0.9:1",
            "",
            Obstacle("it requires a token", "Send one"),
            "the Ray cluster at 10.0.0.9:1 can't be joined: it requires a token. Send one",
        ),
    ],
)
def test_why_a_cluster_cannot_be_joined(
    monkeypatch: pytest.MonkeyPatch, address: str, environment: str, obstacle: Obstacle, said: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", environment)
    monkeypatch.setattr(clusters, "find_obstacle", lambda address: obstacle)
    with pytest.raises(ControlError) as raised, connected(address):
        pytest.fail("it can't be joined")
    assert str(raised.value) == said


@pytest.mark.parametrize("error", [RuntimeError, OSError, ValueError, RayError])
def test_an_error_of_ray_is_one_line(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def fail(address: str, **_: object) -> None:
        raise error("no\nway")

    monkeypatch.setattr(clusters, "find_obstacle", lambda address: None)
    monkeypatch.setattr(clusters, "connect", fail)
    said = r"^the Ray cluster at 10\.0\.0\.9:1 can't be joined: no way\. Run"
    with pytest.raises(ControlError, match=said), connected("10.0.0.9:1"):
        pytest.fail("it can't be joined")


def test_a_process_sends_the_token_of_its_users_own_raylet(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    @contextmanager
    def token_of_machine(token: str) -> Generator[None, None, None]:
        sent.append(token)
        yield
        sent.append("forgotten")

    monkeypatch.setattr(clusters, "_clusters_here", lambda: {"10.0.0.9:1": "abc"})
    monkeypatch.setattr(clusters, "token_of_machine", token_of_machine)
    monkeypatch.setattr(clusters, "find_obstacle", lambda address: None)
    monkeypatch.setattr(clusters, "connect", lambda address, **_: sent.append(address))
    monkeypatch.setattr(clusters, "disconnect", lambda: sent.append("left"))
    with connected("10.0.0.9:1"):
        assert sent == ["abc", "10.0.0.9:1"]
    assert sent == ["abc", "10.0.0.9:1", "left", "forgotten"]
    with connected("10.0.0.8:1"):
        assert "10.0.0.8:1" in sent
    assert sent.count("abc") == 1
