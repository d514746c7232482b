"""Workers form torch's default group where they meet. A process has one, so each worker is a process here."""

from __future__ import annotations

import subprocess
import sys

SIZE = 2
_WORKER = """
import sys
import torch
from raycore.node.listeners import offer
from raycore.parallel.rendezvous import Rendezvous

rank, size = int(sys.argv[1]), int(sys.argv[2])
address = sys.argv[3] if rank else offer("127.0.0.1")
print(address, flush=True)
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
    workers: list[subprocess.Popen[str]] = []

    def start(rank: int, *address: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _WORKER, str(rank), str(SIZE), *address]
        workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return workers[-1]

    try:
        first = start(0)
        assert first.stdout is not None
        address = first.stdout.readline().strip()
        start(1, address)
        assert [worker.communicate(timeout=100)[0].split() for worker in workers] == [
            ["0", "2", "3.0"],
            [address, "1", "2", "3.0"],
        ]
        assert [worker.returncode for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
