"""What one step gave, for the engine to hand out to clients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raycore.messages import FinishedRequest, TokenLogprobs


@dataclass(slots=True)
class StepOutputs:
    """One step's outputs. The arrays are read-only and may be shared with the scheduler."""

    seq_ids: NDArray[np.int64]
    """int64[k]: whose `token_ids[i]` is; each seq_id occurs once."""
    token_ids: NDArray[np.int32]
    """int32[k]."""
    started: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(seq_id, num_cached_tokens) of requests that were scheduled for the first time."""
    queued: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """(seq_id, seconds) of the same requests: from their arrival to their first step. The engine adds it."""
    duration_s: float = 0.0
    """From the step's plan to its result. The engine adds it."""
    finished: list[FinishedRequest] = field(default_factory=list[FinishedRequest])
    """Their last tokens are in `token_ids`."""
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list[tuple[int, TokenLogprobs]])
    """(index into `token_ids`, logprobs of that token)."""
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = field(
        default_factory=list[tuple[int, int, list[TokenLogprobs]]]
    )
    """(seq_id, first position, one entry for each position from there on); no position comes twice."""
    flush_interval_s: float = math.inf
    """The smallest flush interval among the requests with new tokens; infinite when there is no new token."""
