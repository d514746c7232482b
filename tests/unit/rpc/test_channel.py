"""What channels need of /dev/shm, which is asked for before Ray would abort."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any

import pytest

from raycore.rpc import channel
from raycore.rpc.channel import ChannelTransport, RawChannel

PAIR = 2 * mmap.PAGESIZE
"""The semaphores of a channel."""


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The bytes that are free. Whoever creates a channel, takes some of them."""
    left = [0]
    monkeypatch.setattr(channel, "_SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(channel, "free_bytes", lambda path: left[0])
    monkeypatch.setattr(channel, "get_self_actor", object)
    monkeypatch.setattr(channel, "node_id", lambda: "here")

    def create(*_: object) -> Any:
        left[0] -= PAIR
        raise OSError("Ray was asked")

    monkeypatch.setattr(channel, "Channel", create)
    return left


def test_a_channel_that_has_no_room_is_an_error_before_ray_is_asked(free: list[int], tmp_path: Path):
    free[0] = PAIR - 1
    said = rf"^the channels need {PAIR >> 10} KiB of {re.escape(str(tmp_path))}: .* are free\. .*--shm-size"
    with pytest.raises(OSError, match=said):
        RawChannel.create([], 8)
    free[0] = PAIR
    with pytest.raises(OSError, match="Ray was asked"):
        RawChannel.create([], 8)


@pytest.mark.parametrize(("stage_size", "num_channels"), [(None, 5), (2, 6)])
def test_a_transport_needs_room_for_its_workers_channels_too(
    free: list[int], stage_size: int | None, num_channels: int
):
    workers: list[Any] = [object()] * 4
    free[0] = num_channels * PAIR - 1
    with pytest.raises(OSError, match=f"need {num_channels * PAIR >> 10} KiB"):
        ChannelTransport(workers, ["here"] * 4, 8, 0.0, stage_size)
    free[0] += 1
    with pytest.raises(OSError, match="Ray was asked"):
        ChannelTransport(workers, ["here"] * 4, 8, 0.0, stage_size)


def test_without_a_shared_memory_directory_ray_is_asked(free: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel, "_SHARED_MEMORY", "/gone")
    with pytest.raises(OSError, match="Ray was asked"):
        RawChannel.create([], 8)
