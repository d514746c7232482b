"""What an engine does: it runs, is paused, or is asleep. The driver decides this for all ranks.

A rank that starts is told the engine's activity, and learns of every change. `Activity` is absolute: it says what a
rank has to do, not what has changed, so a rank needs no history to follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

PauseMode = Literal["abort", "wait", "keep"]
"""What happens to unfinished requests in a pause: they are aborted, they finish first, or they continue afterwards."""

MemoryTag = Literal["weights", "kv_cache"]
TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")
"""What a rank's memory is used for, as far as it can sleep."""


class Activity(msgspec.Struct, frozen=True):
    """What the ranks of an engine have to do."""

    is_paused: bool = False
    """Whether ranks run no steps. Always set while anything is asleep."""
    sleep_level: int = 0
    """The level of the sleep, 1 or 2. 0 if nothing is asleep."""
    asleep: tuple[MemoryTag, ...] = ()
    """The memory that is given up. It returns in parts, if the caller wants that."""
    reads_weights: bool = True
    """Whether weights that wake up from a sleep of level 2 are read from the checkpoint. If not, an update has to bring
    all of them."""

    def paused(self) -> Activity:
        """The activity after a pause."""
        return msgspec.structs.replace(self, is_paused=True)

    def put_to_sleep(self, level: int) -> Activity:
        """The activity after `sleep(level)`. A deeper sleep stays as deep as it is."""
        return Activity(is_paused=True, sleep_level=max(level, self.sleep_level), asleep=TAGS)

    def woken(self, tags: Sequence[MemoryTag], *, reads_weights: bool = True) -> Activity:
        """The activity after `wake_up(tags, reads_weights)`, still paused."""
        asleep: tuple[MemoryTag, ...] = tuple(tag for tag in self.asleep if tag not in tags)
        return Activity(True, self.sleep_level if asleep else 0, asleep, reads_weights)

    def falling_asleep_from(self, before: Activity) -> tuple[MemoryTag, ...]:
        """The memory that a rank has to give up to follow this activity, if it followed `before`."""
        is_deeper = self.sleep_level > before.sleep_level
        return tuple(tag for tag in self.asleep if is_deeper or tag not in before.asleep)

    def waking_from(self, before: Activity) -> tuple[MemoryTag, ...]:
        """The memory that a rank has to get back to follow this activity, if it followed `before`."""
        return tuple(tag for tag in before.asleep if tag not in self.asleep)


RUNNING = Activity()
