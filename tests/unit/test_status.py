"""What `raycore status` prints."""

from __future__ import annotations

import re

import pytest

from raycore.status import (
    EngineOwner,
    EngineStatus,
    FoundEngine,
    RankStatus,
    describe_engine,
    describe_owner,
    engine_table,
    num_serving,
    rank_table,
)

NODES = ["a1b2c3d4e5f6", "0f1e2d3c4b5a"]


def test_the_rank_table_has_a_line_for_each_rank_and_aligned_columns() -> None:
    ranks = [
        RankStatus(
            *(0, "serving", NODES[:1], 4711, ["0", "1"]),
            num_running=3,
            num_waiting=12,
            kv_usage=0.5,
            backends=("native (amx)", "native (avx2)"),
        ),
        RankStatus(10, "restarting", NODES, num_restarts=2),
    ]
    assert rank_table(ranks).splitlines() == [
        "rank  state       node               backend                      pid  GPUs  running  waiting  KV %  restarts",
        "dp0   serving     a1b2c3d4           native (amx),native (avx2)  4711   0,1        3       12  50.0         0",
        "dp10  restarting  a1b2c3d4,0f1e2d3c  -                              -     -        0        0   0.0         2",
    ]


def test_the_headline_of_an_engine_names_it_and_its_serving_ranks() -> None:
    ranks = [RankStatus(0, "serving", NODES[:1]), RankStatus(1, "gone", NODES[1:])]
    headline, _, *rows = describe_engine(EngineStatus("chat", "/models/m", ranks)).splitlines()
    assert headline == "engine chat: 1 of 2 ranks serving, model /models/m"
    assert [row.split()[0] for row in rows] == ["dp0", "dp1"]


OWNER = EngineOwner("replica", "app#sums#x1", 7, NODES[0], "10.0.0.1", "01000000")


def test_an_owner_is_shown_with_its_process_and_its_job_as_it_was_submitted() -> None:
    assert describe_owner(OWNER) == "replica app#sums#x1 (pid 7, node a1b2c3d4 at 10.0.0.1, job 01000000)"
    driver = EngineOwner("driver", "", 7, NODES[0], "10.0.0.1", "02000000", "raysubmit_1")
    assert describe_owner(driver) == "driver (pid 7, node a1b2c3d4 at 10.0.0.1, job raysubmit_1)"
    assert (
        describe_engine(EngineStatus("chat", "m", [], owner=OWNER))
        .splitlines()[0]
        .endswith(f"model m, owner {describe_owner(OWNER)}")
    )


def test_several_engines_have_a_row_each_with_their_loads_and_below_what_is_wrong() -> None:
    ranks = [RankStatus(i, "serving", [], num_running=i, num_waiting=1, kv_usage=i / 4) for i in range(3)]
    engines = [
        FoundEngine("10.0.0.1:6379", "chat", EngineStatus("chat", "/models/m", ranks, owner=OWNER)),
        FoundEngine("10.0.0.1:6379", "sums", None, "engine sums's control actor hasn't answered for 5 s"),
    ]
    headings, chat, sums, problem = (re.split(r" {2,}", line) for line in engine_table(engines).splitlines())
    assert headings == ["engine", "ranks", "model", "owner", "running", "waiting", "KV %"]
    assert chat == ["chat", "3 of 3 ranks serving", "/models/m", describe_owner(OWNER), "3", "3", "50.0"]
    assert sums == ["sums", "no answer", "-", "-", "-", "-", "-"]
    assert problem == [engines[1].problem]


def test_engines_of_several_clusters_are_shown_with_their_addresses() -> None:
    found = [FoundEngine(f"10.0.0.{i}:6379", "chat", EngineStatus("chat", "m", [])) for i in (1, 2)]
    headings, *rows = (line.split()[0] for line in engine_table(found).splitlines())
    assert headings == "cluster"
    assert rows == ["10.0.0.1:6379", "10.0.0.2:6379"]


def test_ranks_without_room_are_named_with_what_is_missing() -> None:
    missing = "1 rank of 1 worker doesn't fit the cluster\neach rank needs 1 worker of CPU 1"
    states = ("serving", "unplaced", "unplaced")
    ranks = [RankStatus(i, state, [], shortage="" if i == 0 else missing) for i, state in enumerate(states)]
    headline, _, *rows, first, second = describe_engine(EngineStatus("chat", "m", ranks)).splitlines()
    assert headline.startswith("engine chat: 1 of 3 ranks serving")
    assert [row.split()[1:3] for row in rows[1:]] == [["unplaced", "-"]] * 2
    assert (first, second) == (
        "no room for dp1, dp2: 1 rank of 1 worker doesn't fit the cluster",
        "each rank needs 1 worker of CPU 1",
    )


def test_ranks_whose_parts_plain_torch_computes_are_named_together() -> None:
    parts = [("attention",), ("gates (gelu)", "routers"), (), ("attention",)]
    ranks = [RankStatus(dp_rank, "serving", [], parts_by_torch=each) for dp_rank, each in enumerate(parts)]
    assert describe_engine(EngineStatus("chat", "m", ranks)).splitlines()[-2:] == [
        "plain torch computes on dp0, dp3: attention",
        "plain torch computes on dp1: gates (gelu), routers",
    ]


def test_ranks_whose_weights_are_kept_alike_are_named_together() -> None:
    weights = [("4 stay integers",), ("4 stay integers",), ("2 stay integers", "3 stay integers"), ()]
    ranks = [RankStatus(dp_rank, "serving", [], weights=each) for dp_rank, each in enumerate(weights)]
    assert describe_engine(EngineStatus("chat", "m", ranks)).splitlines()[-2:] == [
        "weights on dp0, dp1: 4 stay integers",
        "weights on dp2: 2 stay integers; 3 stay integers",
    ]


@pytest.mark.parametrize("state", ["paused", "asleep"])
def test_the_headline_of_a_paused_or_sleeping_engine_says_so(state) -> None:
    ranks = [RankStatus(0, state, NODES[:1]), RankStatus(1, "restarting", NODES[1:])]
    assert num_serving(EngineStatus("chat", "/models/m", ranks)) == f"1 of 2 ranks {state}"


def test_an_engine_without_ranks_has_a_table_without_rows() -> None:
    assert describe_engine(EngineStatus("chat", "m", [])).splitlines()[0].startswith("engine chat: 0 of 0 ranks")


def test_an_engine_says_what_its_weights_are_called_once_they_have_changed() -> None:
    assert "weights" not in describe_engine(EngineStatus("chat", "m", []))
    updated = EngineStatus("chat", "m", [], weight_version="v7")
    assert describe_engine(updated).splitlines()[0].endswith("model m, weights of version 'v7'")
    assert rank_table([]).split() == [
        "rank",
        "state",
        "node",
        "backend",
        "pid",
        "GPUs",
        "running",
        "waiting",
        "KV",
        "%",
        "restarts",
    ]


def test_a_cpu_rank_says_how_fast_its_decodes_read_the_weights_once_there_were_some() -> None:
    ranks = [
        RankStatus(0, "serving", [], decode_rate=21.26e9, memory_rate=29.5e9),
        RankStatus(1, "serving", [], memory_rate=29.5e9),
        RankStatus(2, "serving", [], decode_rate=9e9, memory_rate=30e9),
    ]
    last = describe_engine(EngineStatus("chat", "m", ranks)).splitlines()[-1]
    assert last == "weights that decodes read: dp0 21.3 of 29.5 GB/s, dp2 9.0 of 30.0 GB/s"
    assert "GB/s" not in describe_engine(EngineStatus("chat", "m", ranks[1:2]))
