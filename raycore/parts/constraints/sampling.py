"""Forces tokens: those of the closing tag of reasoning that has had its number of tokens, and replayed ones. Pure.

What is forced is a function of the tokens so far. So it is the same after a preemption, on another rank, and after
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raycore.messages import ThinkingLimit


def forced_token(limit: ThinkingLimit, token_ids: NDArray[np.int32], num_prompt: int) -> int | None:
    """Return the token that has to come next. None: the limit forces none.

    Args:
        token_ids: the tokens of the prompt and of the output so far.
    """
    begin = _begin(limit, token_ids, num_prompt)
    if begin is None:
        return None
    # a prompt may have used up the tokens already
    end = max(begin + limit.max_tokens, num_prompt)
    num_forced = len(token_ids) - end
    if num_forced < 0:
        return None
    written = token_ids[begin:end]
    longest = min(len(limit.closing) - 1, len(written))
    begun = next((n for n in range(longest, 0, -1) if _ends_with(written, limit.closing[:n])), 0)
    forced = limit.closing[begun:] if begun else limit.forced
    return forced[num_forced] if num_forced < len(forced) else None


def replayed_token(trace: Sequence[int], num_output: int) -> int | None:
    """Return the token that comes after `num_output` tokens of a replayed output. None: it has no more."""
    return trace[num_output] if num_output < len(trace) else None


def _begin(limit: ThinkingLimit, token_ids: NDArray[np.int32], num_prompt: int) -> int | None:
    """The index of the first token of the reasoning in which the output is. None: it isn't in any."""
    first = 0 if limit.is_open is None else num_prompt  # a prompt that is known to be open doesn't count
    opened = _end_of_last(token_ids[first:], limit.opening)
    closed = _end_of_last(token_ids[first:], limit.closing)
    if opened > closed:
        return first + opened
    return num_prompt if limit.is_open and closed < 0 else None


def _end_of_last(token_ids: NDArray[np.int32], wanted: list[int]) -> int:
    """The index after the last occurrence of `wanted`; -1 if there is none."""
    last = len(wanted) - 1
    for index in np.flatnonzero(token_ids[last:] == wanted[last])[::-1].tolist():
        if token_ids[index : index + last].tolist() == wanted[:last]:
            return index + len(wanted)
    return -1


def _ends_with(token_ids: NDArray[np.int32], wanted: list[int]) -> bool:
    return len(token_ids) >= len(wanted) and token_ids[len(token_ids) - len(wanted) :].tolist() == wanted
