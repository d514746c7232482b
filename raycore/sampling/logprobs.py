"""Log probabilities or logits of tokens, as `TokenLogprobs` messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from raycore.messages import TokenLogprobs
from raycore.step.copies import Download, to_device


class Logprobs(NamedTuple):
    """Natural logarithms of the softmax of R rows of logits, computed in float32, or the logits themselves."""

    own_R: Tensor
    """float32[R]: of the row's token."""
    ranks_R: Tensor
    """int64[R]: 1 plus the number of tokens that are strictly more likely than the row's token."""
    likely_RK: Tensor
    """float32[R, K]: of the K most likely tokens, from the most likely one on."""
    likely_ids_RK: Tensor
    """int64[R, K]: these tokens."""


class LogprobsDownload(Protocol):
    """Entries on their way to the host."""

    def entries(self) -> list[TokenLogprobs]:
        """Wait for the log probabilities. Returns an entry for each row."""
        ...


def logprobs(
    logits_RV: Tensor, token_ids_R: Tensor, num_likely: int, row_by_row: bool = False, are_logits: bool = False
) -> Logprobs:
    """Return the log probabilities of each row's token, and of its `num_likely` most likely tokens.

    Args:
        row_by_row: compute each row by itself. Then its bits and the order of ties don't depend on other rows, and only
            one row is copied at a time.
        are_logits: return logits instead, as float32.
    """
    if row_by_row and len(logits_RV) > 1:
        rows = [
            logprobs(logits_RV[i : i + 1], token_ids_R[i : i + 1], num_likely, are_logits=are_logits)
            for i in range(len(logits_RV))
        ]
        return Logprobs(*(torch.cat(column) for column in zip(*rows, strict=True)))
    values_RV = logits_RV.float() if are_logits else torch.log_softmax(logits_RV.float(), dim=-1)
    own_R1 = values_RV.gather(1, token_ids_R.unsqueeze(1))
    ranks_R = 1 + (values_RV > own_R1).sum(dim=-1)
    return Logprobs(own_R1.squeeze(1), ranks_R, *values_RV.topk(num_likely, dim=-1))


class ChosenLogprobsDownload:
    """The log probabilities of some rows' tokens and of tokens that their requests chose, on their way to the host."""

    def __init__(
        self, logits_RV: Tensor, token_ids_R: Tensor, chosen: Sequence[Sequence[int]], *, are_logits: bool
    ) -> None:
        """Start to compute an entry for each row: its token, then the tokens `chosen[row]`.

        Args:
            token_ids_R: int64, on the logits' device.
            are_logits: return logits instead.
        """
        self._chosen = chosen
        ids_RC = np.zeros((len(chosen), max(map(len, chosen))), np.int64)
        for row, ids in enumerate(chosen):
            ids_RC[row, : len(ids)] = ids
        device_ids_RC = to_device(ids_RC, logits_RV.device)
        parts: list[Logprobs] = []
        others: list[Tensor] = []
        for row in range(len(chosen)):  # one by one, so that a row's bits don't depend on other rows
            logits_1V = logits_RV[row : row + 1].float()
            values_1V = logits_1V if are_logits else torch.log_softmax(logits_1V, dim=-1)
            parts.append(logprobs(values_1V, token_ids_R[row : row + 1], 0, are_logits=True))
            others.append(values_1V.index_select(1, device_ids_RC[row]))
        own_R, ranks_R = torch.cat([part.own_R for part in parts]), torch.cat([part.ranks_R for part in parts])
        self._download = Download([token_ids_R, own_R, ranks_R, torch.cat(others)])

    def entries(self) -> list[TokenLogprobs]:
        """Wait for the log probabilities. Returns an entry for each row."""
        columns = [column.tolist() for column in self._download.arrays()]
        return [
            TokenLogprobs([token_id, *ids], [own, *values[: len(ids)]], rank)
            for token_id, own, rank, values, ids in zip(*columns, self._chosen, strict=True)
        ]


class TokenLogprobsDownload:
    """The log probabilities of some rows' tokens, on their way to the host."""

    def __init__(
        self,
        compute: Callable[[Tensor, Tensor, int], Logprobs],
        logits_RV: Tensor,
        token_ids_R: Tensor,
        num_likely: Sequence[int],
    ) -> None:
        """Start to compute an entry for each row: its token, then its `num_likely[row]` most likely tokens (-1: all).

        Args:
            compute: `SamplingKernels.logprobs`.
            token_ids_R: int64, on the logits' device.
        """
        vocab_size = logits_RV.shape[1]
        self._widths = [vocab_size if k < 0 else min(k, vocab_size) for k in num_likely]
        self._download = Download([token_ids_R, *compute(logits_RV, token_ids_R, max(self._widths, default=0))])

    def entries(self) -> list[TokenLogprobs]:
        """Wait for the log probabilities. Returns an entry for each row."""
        token_ids, own, ranks, likely_RK, likely_ids_RK = self._download.arrays()
        columns = zip(
            token_ids.tolist(), own.tolist(), likely_ids_RK, likely_RK, self._widths, ranks.tolist(), strict=True
        )
        return [
            TokenLogprobs([token_id, *ids_K[:width].tolist()], [logprob, *values_K[:width].tolist()], rank)
            for token_id, logprob, ids_K, values_K, width, rank in columns
        ]
