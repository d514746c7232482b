"""Moves the weights of a CPU's model into huge pages, once the engine is ready.

A step with few sequences reads each weight once. In pages of 4 KB, a core looks up another address for every 64 lines
of the cache, and fetches ahead only within a page. Memory that is allocated in huge pages may take much longer to fill
for the first time, which the start would wait for. So weights are moved afterwards, by a thread that rests as long as
it works.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from raycore.system import threading
from raycore.worker.core import WorkerCore
from raycore.worker.part import WorkerPart

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

PAGE_BYTES = 2 << 20
"""Of the huge pages of x86, and of Arm's with small pages of 4 KB."""
_MADV_COLLAPSE = 25
"""Of Linux's madvise(), since Linux 6.1: moves what lies in a range into huge pages, and returns when that is done."""
_DELAY_S = 2.0
"""The time after the warm-up in which the thread does nothing: the rest of the start needs the cores."""
_JOIN_S = 5.0
_MAX_FAILURES = 8
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HugePages(WorkerPart):
    """Moves the weights after each warm-up, while requests may run already."""

    def __init__(self, core: WorkerCore) -> None:
        super().__init__(core)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def warmed_up(self) -> None:
        """Begin to move the weights, if they are many enough."""
        self._end()
        if self.core.setup.device.type != "cpu" or not allows_huge_pages():
            return
        pages = huge_pages_in(self.core.model.weight_tensors().values())
        if not pages:
            return
        self._stop = threading.Event()
        arguments = (pages, self._stop)
        self._thread = threading.Thread(target=_move_later, args=arguments, name="raycore-huge-pages", daemon=True)
        self._thread.start()

    def release_cache(self) -> None:
        """Stop: the weights may be given up next. The next warm-up begins again."""
        self._end()

    def shut_down(self) -> None:
        """Stop."""
        self._end()

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)  # it is at most one page away from its end, and does no harm if it isn't
            self._thread = None


def huge_pages_in(tensors: Iterable[Tensor]) -> list[int]:
    """Return the addresses, in ascending order, of places of huge pages of which `tensors` fill half or more.

    What else lies there is moved, too: between small weights lies what the loader has freed.
    """
    spans = sorted(
        (each.data_ptr(), each.data_ptr() + each.nbytes)
        for each in tensors
        if not each.is_mkldnn and each.is_contiguous()
    )
    covered: dict[int, int] = {}
    counted_to = 0
    for start, end in spans:
        start = max(start, counted_to)  # what views share counts once
        counted_to = max(end, counted_to)
        for page in range(start // PAGE_BYTES, -(-end // PAGE_BYTES)):
            first, last = page * PAGE_BYTES, (page + 1) * PAGE_BYTES
            covered[page] = covered.get(page, 0) + max(0, min(end, last) - max(start, first))
    return [page * PAGE_BYTES for page, num_bytes in covered.items() if num_bytes >= PAGE_BYTES // 2]


def allows_huge_pages(setting: Path = _SETTING) -> bool:
    """Whether this machine's processes may have huge pages. `setting`: the kernel's file that says so."""
    try:
        return "[never]" not in setting.read_text()
    except OSError:  # a kernel without them
        return False


def move(pages: Iterable[int], stop: threading.Event) -> int:
    """Have the memory at each of `pages` lie in a huge page. What is in it stays the same. Returns how many do so.

    Rests after each as long as it took. Ends early when `stop` is set, or when several in a row can't be moved: then
    the kernel doesn't know how, or has no free huge pages.
    """
    madvise = ctypes.CDLL(None).madvise
    num_moved = failures = 0
    for page in pages:
        begun_s = perf_counter()
        if madvise(ctypes.c_void_p(page), ctypes.c_size_t(PAGE_BYTES), _MADV_COLLAPSE):
            failures += 1
        else:
            num_moved, failures = num_moved + 1, 0
        if failures == _MAX_FAILURES or stop.wait(perf_counter() - begun_s):
            break
    return num_moved


def _move_later(pages: list[int], stop: threading.Event) -> None:
    if stop.wait(_DELAY_S):
        return
    begun_s = perf_counter()
    num_moved = move(pages, stop)
    logger.info(
        "%d of %d MB of weights moved to huge pages in %.1f s",
        num_moved * PAGE_BYTES >> 20,
        len(pages) * PAGE_BYTES >> 20,
        perf_counter() - begun_s,
    )
