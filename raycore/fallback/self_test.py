"""Tests a network when it is loaded: raycore's way to compute it against transformers' own, with the real weights.

raycore computes tokens of several sequences in one row, in any order, and attention is all that may connect them. So
the test's sequences are shuffled into one row of tokens, and their logits must be those that transformers computes for
each sequence alone, with its own attention, before anything in the network was replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from raycore.fallback.interface import PAGED, answer_with
from raycore.fallback.networks import REFERENCE
from raycore.fallback.trace import AttentionCall, Unsupported, first_line, run
from raycore.parallel.tensor_parallel import TensorParallel

_LENGTHS = (9, 4, 6)
_TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.03}
"""Largest difference of a row of logits, as a fraction of how much its logits differ, in half of the rows."""


class SelfTest:
    """Remembers what transformers computes, and compares."""

    def __init__(self, network: Any, vocab_size: int) -> None:
        """Compute the reference with the network as transformers made it.

        Raises:
            Unsupported: this fails.
        """
        special = _special_tokens(network.config)
        usable = [token for token in range(min(vocab_size, 1 << 14)) if token not in special]
        generator = torch.Generator().manual_seed(0)
        network.set_attn_implementation(REFERENCE)
        self._sequences = [
            torch.tensor([usable[i] for i in torch.randint(len(usable), (length,), generator=generator)])
            for length in _LENGTHS
        ]
        try:
            self._expected_TV = torch.cat([run(network, token_ids_T, None).float() for token_ids_T in self._sequences])
        except Exception as error:  # models' code may raise anything
            raise Unsupported(
                f"transformers' own forward pass failed: {type(error).__name__}: {first_line(error)}"
            ) from error
        self._dtype = network.dtype

    def check(
        self,
        network: Any,
        calls: list[AttentionCall],
        ranks: TensorParallel,
        compute: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Compare.

        Args:
            calls: what the network asks of attention, in the order of a forward pass.
            ranks: those that the network has been divided over since.
            compute: returns the logits [T, V] of tokens [T] at positions [T].

        Raises:
            Unsupported: the results differ.
        """
        token_ids_T = torch.cat(self._sequences)
        positions_T = torch.cat([torch.arange(length) for length in _LENGTHS])
        owners_T = torch.arange(len(_LENGTHS)).repeat_interleave(torch.tensor(_LENGTHS))
        order_T = torch.randperm(len(token_ids_T), generator=torch.Generator().manual_seed(1))
        answers = _ShuffledAnswers(calls, ranks, owners_T[order_T], positions_T[order_T])
        network.set_attn_implementation(PAGED)
        answer_with(network, answers)
        try:
            found_TV = compute(token_ids_T[order_T], positions_T[order_T]).float().cpu()
        except Exception as error:  # models' code may raise anything
            raise Unsupported(
                f"a forward pass of several sequences failed: {type(error).__name__}: {first_line(error)}"
            ) from error
        expected_TV = self._expected_TV[order_T]
        if found_TV.shape != expected_TV.shape:
            raise Unsupported(f"its logits have shape {tuple(found_TV.shape)}, not {tuple(expected_TV.shape)}")
        spread_T = expected_TV.std(dim=1)
        errors_T = (found_TV - expected_TV).std(dim=1) / spread_T
        worst = errors_T.max() if self._dtype == torch.float32 else errors_T.median()
        if not worst <= _TOLERANCES[self._dtype]:
            raise Unsupported(
                "for several sequences in one row of tokens, it computes other logits than for each alone (they differ "
                f"by {float(worst):.1%}): it depends on the places of tokens in a step, or on what raycore's attention "
                "isn't told"
            )


def _special_tokens(config: Any) -> set[int]:
    """Return the tokens that a configuration names, which models may treat differently."""
    found: set[int] = set()
    for name in config.to_dict():
        if name.endswith("_token_id"):
            value = getattr(config, name)
            found.update(cast("list[int]", value if isinstance(value, list) else [value]))
    return found


class _ShuffledAnswers:
    """Attention among shuffled tokens of several sequences, from its definition. N query heads, T tokens."""

    def __init__(
        self, calls: list[AttentionCall], ranks: TensorParallel, owners_T: Tensor, positions_T: Tensor
    ) -> None:
        self._calls = calls
        self._ranks = ranks
        self._next = 0
        same_TT = owners_T[:, None] == owners_T
        self._behind_TT = torch.where(same_TT, positions_T[:, None] - positions_T, -1)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, arguments: dict[str, Any]
    ) -> Tensor:
        call = self._calls[self._next]
        self._next += 1
        behind_TT = self._behind_TT.to(query.device)
        is_seen_TT = behind_TT >= 0
        if call.window is not None:
            is_seen_TT &= behind_TT < call.window
        group = query.shape[1] // key.shape[1]
        key, value = key[0].repeat_interleave(group, 0).float(), value[0].repeat_interleave(group, 0).float()
        scores_NTT = query[0].float() @ key.transpose(1, 2) * call.scale
        if call.softcap is not None:
            scores_NTT = call.softcap * (scores_NTT / call.softcap).tanh()
        scores_NTT = scores_NTT.masked_fill(~is_seen_TT, -torch.inf)
        if call.sinks_N is not None:
            num_heads = query.shape[1]
            first = self._ranks.rank * num_heads if num_heads < call.num_heads else 0
            sinks_N = call.sinks_N[first : first + num_heads].to(query.device).float()
            sinks_NT1 = sinks_N[:, None, None].expand(-1, scores_NTT.shape[1], 1)
            scores_NTT = torch.cat([scores_NTT, sinks_NT1], dim=2)
        weights_NTT = scores_NTT.softmax(-1)[..., : len(behind_TT)]
        return (weights_NTT @ value).transpose(0, 1)[None].to(query.dtype).contiguous()
