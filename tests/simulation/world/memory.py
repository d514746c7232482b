"""Memory without a name that processes share: its descriptors are real ones, and each belongs to a simulated process.

Those of a process that ends are closed. One that is sent belongs to nobody until it is received.
"""

from __future__ import annotations

import os

from simulation.world import kernel


def _owners() -> dict[int, kernel.Process]:
    assert kernel.the_world is not None
    return kernel.the_world.systems.setdefault("descriptors of memory", {})


def create(name: str, flags: int = 0) -> int:
    """Stands in for `os.memfd_create`."""
    return own(os.memfd_create(name, flags))


def own(number: int) -> int:
    """Give a descriptor to the process that runs."""
    if kernel.the_world is None or kernel.the_world.current is None:
        return number
    process, owners = kernel.the_world.current.process, _owners()
    if "_had_memory" not in vars(process):
        vars(process)["_had_memory"] = True
        process.on_end.append(lambda ended: _end(owners, ended))
    owners[number] = process
    return number


def close(number: int) -> None:
    """Stands in for `os.close`."""
    if kernel.the_world is not None:
        _owners().pop(number, None)
    os.close(number)


def open_in(process: kernel.Process) -> list[int]:
    """The descriptors that a process has open."""
    return [number for number, owner in _owners().items() if owner is process]


def _end(owners: dict[int, kernel.Process], process: kernel.Process) -> None:
    for number in [number for number, owner in owners.items() if owner is process]:
        del owners[number]
        os.close(number)
