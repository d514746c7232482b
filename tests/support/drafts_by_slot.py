"""Drafts as tests compare them."""

from __future__ import annotations

from raycore.parts.drafts.guesses.drafts import Drafts


def by_slot(drafts: Drafts) -> dict[int, list[int]]:
    """The tokens of each slot's draft."""
    rows = zip(drafts.slots.tolist(), drafts.lengths.tolist(), drafts.padded_ids.tolist(), strict=True)
    return {slot: row[:length] for slot, length, row in rows}
