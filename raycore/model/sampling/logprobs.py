"""Log probabilities of tokens, computed from the model's unmodified logits, as `TokenLogprobs` messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.messages import TokenLogprobs


def token_logprobs(
    logits_RV: Tensor, token_ids: NDArray[np.integer], num_top: Sequence[int], batch_invariant: bool = False
) -> list[TokenLogprobs]:
    """Return an entry for each row: its token, then its `num_top[row]` most likely tokens (-1: the whole vocabulary).

    The log probabilities are natural logarithms of the softmax of `logits_RV`, computed in float32. The token's rank is
    1 plus the number of tokens that are strictly more likely.

    Args:
        batch_invariant: compute each row by itself, so that its bits and the order of ties don't depend on other rows.
    """
    if batch_invariant and len(logits_RV) > 1:
        rows = range(len(logits_RV))
        return [token_logprobs(logits_RV[i : i + 1], token_ids[i : i + 1], num_top[i : i + 1])[0] for i in rows]
    vocab_size = logits_RV.shape[1]
    widths = [vocab_size if k < 0 else min(k, vocab_size) for k in num_top]
    logprobs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    own_R1 = logprobs_RV.gather(1, torch.as_tensor(token_ids, dtype=torch.int64, device=logits_RV.device).unsqueeze(1))
    ranks: list[int] = (1 + (logprobs_RV > own_R1).sum(dim=-1)).cpu().numpy().tolist()
    top = logprobs_RV.topk(max(widths, default=0), dim=-1)
    own = own_R1.squeeze(1).cpu().numpy().tolist()
    columns = zip(
        token_ids.tolist(), own, top.indices.cpu().numpy(), top.values.cpu().numpy(), widths, ranks, strict=True
    )
    return [
        TokenLogprobs([token_id, *ids_K[:width].tolist()], [logprob, *values_K[:width].tolist()], rank)
        for token_id, logprob, ids_K, values_K, width, rank in columns
    ]


def prompt_logprobs(
    logits_TV: Tensor, next_token_ids: NDArray[np.integer], num_top: int, batch_invariant: bool = False
) -> list[TokenLogprobs]:
    """Return an entry for each position t: the following token, `next_token_ids[t]`, then the most likely tokens."""
    return token_logprobs(logits_TV, next_token_ids, [num_top] * len(next_token_ids), batch_invariant)
