"""Workers meet at an address, and form groups and links. Each is a thread of this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from raycore.node.listeners import offer
from raycore.parallel import peer_memory
from raycore.parallel.rendezvous import Rendezvous

TP_SIZE = 2
NUM_STAGES = 3


def _work(address: str, worker: int) -> list[float]:
    """Add 1 in each stage, and sum up over the ranks of the stage. Returns the hidden states of the last stage."""
    stage, tp_rank = divmod(worker, TP_SIZE)
    workers = Rendezvous(address, worker, TP_SIZE * NUM_STAGES, torch.device("cpu"), timeout_s=20)
    ranks = workers.collectives(f"stage {stage}", tp_rank, TP_SIZE)
    link = lambda first, *, sends: workers.link(f"{first} {tp_rank}", sends=sends, capacity_bytes=64)  # noqa: E731
    source = link(stage - 1, sends=False) if stage else None
    sink = link(stage, sends=True) if stage < NUM_STAGES - 1 else None
    workers.part()
    sums: list[float] = []
    for step in range(20):
        h_TD = torch.full((2, 3), float(step)) if source is None else source.receive_into(torch.empty(2, 3))
        h_TD = ranks.all_reduce_(h_TD + 1)
        if sink is not None:
            sink.send(h_TD)
        else:
            sums.append(float(h_TD.sum()))
    for part in (ranks, source, sink, workers):
        if part is not None:
            part.close()
    return sums


@pytest.mark.parametrize("shares_memory", [True, False], ids=["one node", "several nodes"])
def test_stages_that_met_pass_hidden_states_one_after_the_other(monkeypatch, shares_memory):
    if not shares_memory:
        monkeypatch.setattr(peer_memory, "_open", lambda store, num_bytes: None)
    address, size = offer("127.0.0.1"), TP_SIZE * NUM_STAGES
    with ThreadPoolExecutor(size) as pool:
        sums = list(pool.map(lambda worker: _work(address, worker), range(size)))
    # each stage adds 1 and doubles
    expected = [6 * (((step + 1) * 2 + 1) * 2 + 1) * 2 for step in range(20)]
    assert sums == [[]] * TP_SIZE * (NUM_STAGES - 1) + [expected] * TP_SIZE
