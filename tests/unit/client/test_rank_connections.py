"""How a client receives a rank's outputs."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec

from raycore import ray_api
from raycore.client import rank_connections
from raycore.client.rank_connections import RankConnections
from raycore.messages import OutputBatch


def test_a_ranks_output_stream_continues_in_a_new_call_at_the_limit_of_one_call(monkeypatch):
    """Ray keeps something for each item until the call ends."""
    batch = msgspec.msgpack.encode(OutputBatch())
    calls = [[batch] * 3, [batch] * 3, [batch] * 2, [batch]]
    outputs = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda client, connection: iter(calls.pop(0))))
    monkeypatch.setattr(ray_api, "MAX_STREAMED", 3)
    monkeypatch.setattr(rank_connections, "get", lambda ref: ref)
    delivered: list[OutputBatch] = []
    connections = RankConnections(0, lambda connection, outputs: delivered.append(outputs))
    connections.receive(SimpleNamespace(dp_rank=0, number=1, has_left=False, actor=SimpleNamespace(outputs=outputs)))  # type: ignore[arg-type]
    assert len(delivered) == 8
    assert len(calls) == 1, "a call that yields fewer is the last"
