"""Workers that divide a step's rows, as threads of this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.distributed import HashStore
from waiting import LONG_S

from raycore.messages import StepPlan
from raycore.parallel.collectives import SharedMemoryCollectives
from raycore.parallel.divided_rows import DividedRows
from raycore.step.batch import SlotBatch
from raycore.step.row_shares import MIN_PIECE

NUM_WORKERS = 3
SHORT = 2 * NUM_WORKERS * MIN_PIECE - 1


@pytest.mark.parametrize("counts", [[1, 1, 40, 3], [SHORT, SHORT]], ids=["divided", "all rows are everyone's"])
def test_rows_that_are_computed_apart_are_put_in_the_order_of_the_step(counts: list[int]) -> None:
    store, x_TX = HashStore(), torch.randn(sum(counts), 2)
    step = SlotBatch(1, 8, 4).advance(StepPlan(0))
    step.counts = np.array(counts)

    def run(rank: int):
        collectives = SharedMemoryCollectives.join(store, rank, NUM_WORKERS, timeout_s=LONG_S)
        rows = DividedRows(rank, NUM_WORKERS, collectives, torch.device("cpu"))
        rows.begin(step)
        own = rows.own(x_TX)
        return len(own), rows.gather(own), rows.of_first(torch.tensor([rank])).tolist()

    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        found = list(pool.map(run, range(NUM_WORKERS)))
    assert all(torch.equal(gathered, x_TX) and first == [0] for _, gathered, first in found)
    num_rows = [num for num, _, _ in found]
    assert max(num_rows) < sum(counts) if max(counts) > SHORT else num_rows == [sum(counts)] * NUM_WORKERS
