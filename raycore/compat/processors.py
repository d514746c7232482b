"""A helper of vLLM's logits processors that keep something for some of the requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from raycore.sampling.logits_processors import BatchUpdate, MoveDirectionality
from raycore.sampling_params import SamplingParams

_StateT = TypeVar("_StateT")


def process_dict_updates(
    req_entries: dict[int, _StateT],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], _StateT | None],
) -> bool:
    """Follow what has happened to a batch. Returns whether any entry has changed.

    Args:
        req_entries: what is kept, by the request's index. It is changed in place.
        new_state: what is kept for a new request, from its parameters, the prompt's token ids and the output's. None:
            nothing.
    """
    if batch_update is None:
        return False
    before = dict(req_entries)
    for index in batch_update.removed:
        req_entries.pop(index, None)
    for index, params, prompt_ids, output_ids in batch_update.added:
        req_entries.pop(index, None)
        made = new_state(params, prompt_ids, output_ids)
        if made is not None:
            req_entries[index] = made
    for source, target, direction in batch_update.moved:
        moved, replaced = req_entries.pop(source, None), req_entries.pop(target, None)
        if moved is not None:
            req_entries[target] = moved
        if replaced is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = replaced
    return req_entries != before
