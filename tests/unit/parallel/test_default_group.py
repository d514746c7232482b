"""Workers form torch's default group where they meet. A process has one, so each worker is a process here."""

from __future__ import annotations

import subprocess
import sys

from raycore.node.ports import free_ports

SIZE = 2
_WORKER = """
import sys
import torch
from raycore.parallel.rendezvous import Rendezvous

address, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
workers = Rendezvous(address, rank, size, torch.device("cpu"), timeout_s=60)
group = workers.default_group()
workers.part()
total = torch.tensor([rank + 1.0])
torch.distributed.all_reduce(total)
subset = torch.distributed.new_group([0, 1])  # uses the store, too
torch.distributed.broadcast(total, 0, group=subset)
print(torch.distributed.get_rank(), torch.distributed.get_world_size(), total.item())
torch.distributed.barrier()
group.leave()
group.leave()
workers.close()
assert not torch.distributed.is_initialized()
"""


def test_workers_compute_in_the_default_group_after_they_have_parted() -> None:
    (port,) = free_ports("127.0.0.1", 1)
    command = [sys.executable, "-c", _WORKER, f"tcp://127.0.0.1:{port}"]
    workers = [
        subprocess.Popen([*command, str(rank), str(SIZE)], stdout=subprocess.PIPE, text=True) for rank in range(SIZE)
    ]
    try:
        assert [worker.communicate(timeout=100)[0].split() for worker in workers] == [
            ["0", "2", "3.0"],
            ["1", "2", "3.0"],
        ]
        assert [worker.returncode for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
