"""Weights that move to huge pages: which memory, how, and when it ends."""

from __future__ import annotations

import mmap
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raycore.worker.huge_pages import PAGE_BYTES, allows_huge_pages, huge_pages_in, move


def memory(num_pages: int) -> Tensor:
    """Return uint8[num_pages · PAGE_BYTES] at the beginning of a huge page's place."""
    mapped = torch.frombuffer(mmap.mmap(-1, (num_pages + 1) * PAGE_BYTES, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
    start = -mapped.data_ptr() % PAGE_BYTES
    return mapped[start : start + num_pages * PAGE_BYTES]


def kilobytes_in_huge_pages(address: int) -> int:
    """Return how many KB of the mapping at `address` are in huge pages, as the kernel counts."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(match[1], 16) <= address < int(match[2], 16)
        elif is_inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    raise AssertionError("no mapping")


def test_places_are_those_that_weights_fill_by_half() -> None:
    whole = memory(4)
    places = [whole.data_ptr() + page * PAGE_BYTES for page in range(4)]
    half = PAGE_BYTES // 2
    assert huge_pages_in([whole]) == places
    assert huge_pages_in([whole[half:]]) == places
    assert huge_pages_in([whole[half + 1 :]]) == places[1:]
    assert huge_pages_in([whole[: PAGE_BYTES + half]]) == places[:2]
    assert huge_pages_in([whole[: half - 1]]) == []


def test_small_weights_count_together() -> None:
    whole = memory(2)
    quarter = PAGE_BYTES // 4
    pieces = list(whole.split(quarter))
    assert huge_pages_in([pieces[2], pieces[0]]) == [whole.data_ptr()]
    assert huge_pages_in([pieces[0], pieces[5]]) == []


def test_views_of_the_same_weights_count_once() -> None:
    whole = memory(2)
    assert huge_pages_in([whole, whole.view(torch.int8), whole[:PAGE_BYTES]]) == huge_pages_in([whole])
    third = whole[: PAGE_BYTES // 3]
    assert huge_pages_in([third, third.view(torch.int8)]) == []


@pytest.mark.skipif(not allows_huge_pages(), reason="this kernel gives no huge pages")
def test_moved_weights_keep_their_numbers() -> None:
    weights = memory(3)
    weights.copy_(torch.arange(len(weights)) % 251)
    before = weights.clone()
    moved = move(huge_pages_in([weights]), threading.Event())
    if not moved:
        pytest.skip("this kernel can't move memory to huge pages, or has none that is free")
    assert kilobytes_in_huge_pages(weights.data_ptr()) == moved * PAGE_BYTES >> 10
    assert torch.equal(weights, before)


def test_moving_ends_when_it_is_told_to() -> None:
    weights = memory(3)
    stop = threading.Event()
    stop.set()
    assert move(huge_pages_in([weights]), stop) <= 1


def test_kernel_that_cannot_is_not_asked_for_ever() -> None:
    unmapped = memory(1).data_ptr() + 1  # no page starts here
    asked: list[int] = []

    def places() -> Iterator[int]:
        for _ in range(1000):
            asked.append(unmapped)
            yield unmapped

    assert move(places(), threading.Event()) == 0
    assert len(asked) < 20


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [("always [madvise] never", True), ("[always] madvise never", True), ("always madvise [never]", False)],
)
def test_system_decides_whether_there_are_any(tmp_path: Path, setting: str, allowed: bool) -> None:
    file = tmp_path / "enabled"
    file.write_text(f"{setting}\n")
    assert allows_huge_pages(file) is allowed
    assert not allows_huge_pages(tmp_path / "missing")
