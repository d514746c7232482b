"""The adapters that users have added to an engine. The driver keeps the list, and tells all ranks.

Like an `Activity`, the list is absolute: it says what was added, not what has changed, so a rank that starts needs only
the latest one.
"""

from __future__ import annotations

import msgspec

from raycore.lora.request import LoRARequest

ONLY_REQUESTED = 0
"""Instead of a revision: the adapter wasn't added, it only came with requests."""


class AddedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that was added."""

    adapter: LoRARequest
    revision: int
    """Another number, from 1 on, each time that an adapter is added or replaced."""
    is_replacement: bool = False
    """Whether it has replaced files, so that what its directory held before can't be read any more."""
    is_pinned: bool = False


class AddedAdapters(msgspec.Struct, frozen=True, array_like=True):
    """All adapters that were added and not removed. The latest one is last."""

    number: int = 0
    """Counts the changes. A rank ignores a list that is older than the one it has."""
    adapters: tuple[AddedAdapter, ...] = ()

    def find(self, lora_id: int) -> AddedAdapter | None:
        """The adapter with this number; None if there is none."""
        return next((each for each in self.adapters if each.adapter.lora_int_id == lora_id), None)

    def named(self, lora_name: str) -> AddedAdapter | None:
        """The adapter with this name; None if there is none."""
        return next((each for each in self.adapters if each.adapter.lora_name == lora_name), None)

    def ids(self) -> list[int]:
        """The numbers of all adapters, the latest one last."""
        return [each.adapter.lora_int_id for each in self.adapters]

    def with_adapter(self, adapter: AddedAdapter) -> AddedAdapters:
        """The next list, with `adapter` as the latest one, in place of the one with its number, if any."""
        others = self.without(adapter.adapter.lora_int_id)
        return AddedAdapters(others.number, (*others.adapters, adapter))

    def without(self, lora_id: int) -> AddedAdapters:
        """The next list, without the adapter with this number."""
        others = tuple(each for each in self.adapters if each.adapter.lora_int_id != lora_id)
        return AddedAdapters(self.number + 1, others)

    def first_ids(self, num_adapters: int) -> list[int]:
        """The numbers of the adapters that a rank holds when it starts: those that are pinned, then the latest ones."""
        latest_first = sorted(self.adapters, key=lambda each: (not each.is_pinned, -each.revision))
        return [each.adapter.lora_int_id for each in latest_first[:num_adapters]]


NONE_ADDED = AddedAdapters()
