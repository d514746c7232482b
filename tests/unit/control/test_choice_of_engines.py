"""Which engine `raycore status` and `raycore scale` mean, and where they look for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raycore.control import clusters
from raycore.control.clusters import clusters_to_search
from raycore.control.remote import FoundEngine, choose_engine
from raycore.errors import ControlError

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


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two Rays of this user, of which one is on two nodes, and one that has crashed."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(clusters, "why_unreachable", lambda address: "refused" if address == "10.0.0.1:1" else None)
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
