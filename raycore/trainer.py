"""Log probabilities for a trainer, with the bits of those that an engine sampled with.

An engine with `batch_invariant=True` computes a token's logits in the same order whatever else its steps compute, on
1, 2 or 4 tensor-parallel ranks. `logprobs` does so in the trainer's own process, without Ray. So a policy gradient
needs no importance weights for rounding. Shape suffixes: B sequences, L tokens.
"""

from __future__ import annotations

# torch's tensors are partially typed:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import copy
import tempfile
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from raycore.config import resolve
from raycore.engine.core import EngineCore
from raycore.errors import InvalidInput
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.worker.rank import RankIdentity

__all__ = ["logprobs"]

_NO_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
_scorers: WeakKeyDictionary[nn.Module, dict[tuple[tuple[str, Any], ...], _Scorer]] = WeakKeyDictionary()
"""By model, and by the options."""


def logprobs(model: nn.Module, ids_BL: Tensor, mask_BL: Tensor | None = None, **options: Any) -> Tensor:
    """Return the natural logarithm of each token's probability after the tokens before it.

    The numbers are those that an engine with `batch_invariant=True` returns for the model's weights, to the bit on
    processors of the same kind. Where gradients are enabled, those are of what the model itself computes.

    Args:
        model: a network of transformers' that raycore has, on the CPU. Its weights are read in each call.
        ids_BL: tokens, int64[B, L].
        mask_BL: which of the tokens belong to the sequences, bool or int64[B, L]; those of a sequence must be
            neighbors. None: all.
        options: engine options that the rollouts' engine has, such as `dtype` and `attention_backend`, but none that
            divides the model among workers.

    Returns:
        float32[B, L - 1]: those of `ids_BL[:, 1:]`, and 0 where a token or the one before it is masked.

    Raises:
        InvalidInput: `ids_BL` or `mask_BL` is of another shape, or masked tokens are between others.
        InvalidCheckpoint: raycore doesn't have such a model.
        InvalidConfig: an option is invalid.
    """
    mask_BL = _checked(ids_BL, mask_BL)
    by_options = _scorers.setdefault(model, {})
    key = tuple(sorted(options.items()))
    num_threads = torch.get_num_threads()
    try:
        if key not in by_options:
            by_options[key] = _Scorer(model, options)
        found_BL = by_options[key].score(model, ids_BL, mask_BL)
    finally:
        torch.set_num_threads(num_threads)  # the engine chooses its own
    if not torch.is_grad_enabled():
        return found_BL
    is_scored_BL = mask_BL[:, 1:] & mask_BL[:, :-1]
    logits_BLV = model(input_ids=ids_BL, attention_mask=mask_BL.long()).logits[:, :-1].float()
    own_BL = logits_BLV.log_softmax(-1).gather(-1, ids_BL[:, 1:, None]).squeeze(-1)
    return _Replaced.apply(own_BL * is_scored_BL, found_BL)  # pyright: ignore[reportReturnType]


class _Replaced(torch.autograd.Function):
    """Other numbers, with the gradients of the given ones."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, other: Tensor) -> Tensor:
        return other

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Scorer:
    """An engine in this process, with the weights of a model."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        config: Any = copy.copy(model.config)
        config.architectures = config.architectures or [type(model).__name__]  # if it was never saved
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            given: dict[str, Any] = {
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "enable_prefix_caching": False,
            } | options
            resolved = resolve(Path(folder), batch_invariant=True, **given)
            self._core = EngineCore(resolved, InlineExecutor(resolved, RankIdentity(0, 1)))

    def score(self, model: nn.Module, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Return what `logprobs` does."""
        max_model_len = self._core.config.scheduler.max_model_len
        weights = [(name, weight.detach()) for name, weight in model.state_dict().items()]
        self._core.executor.collective_rpc("load_weights", args=(weights,))
        found_BL = torch.zeros(len(ids_BL), ids_BL.shape[1] - 1)
        for row, (ids_L, mask_L) in enumerate(zip(ids_BL, mask_BL, strict=True)):
            tokens: list[int] = ids_L[mask_L].tolist()
            if len(tokens) >= max_model_len:
                raise InvalidInput(
                    f"sequence {row} has {len(tokens)} tokens: with max_model_len={max_model_len}, it may have "
                    f"{max_model_len - 1}"
                )
            if len(tokens) > 1:
                self._core.submit(EngineRequest(row, str(row), tokens, _NO_TOKEN, seed=0))
        starts_B = mask_BL.int().argmax(dim=1).tolist()
        while self._core.has_work():
            outputs = self._core.step()
            for row, first, entries in () if outputs is None else outputs.prompt_logprobs:
                start = starts_B[row] + first - 1
                found_BL[row, start : start + len(entries)] = torch.tensor([each.logprobs[0] for each in entries])
        return found_BL


def _checked(ids_BL: Tensor, mask_BL: Tensor | None) -> Tensor:
    """Return the mask as bool[B, L]."""
    if ids_BL.dim() != 2 or ids_BL.dtype != torch.int64:
        raise InvalidInput(f"ids_BL is {ids_BL.dtype}{list(ids_BL.shape)}: expected int64[sequences, tokens]")
    if mask_BL is None:
        return torch.ones_like(ids_BL, dtype=torch.bool)
    if mask_BL.shape != ids_BL.shape:
        raise InvalidInput(f"mask_BL is of shape {list(mask_BL.shape)}, and ids_BL of {list(ids_BL.shape)}")
    mask_BL = mask_BL.bool()
    has_gap_B = (mask_BL[:, 1:] & ~mask_BL[:, :-1]).sum(dim=1) + mask_BL[:, 0] > 1
    if has_gap_B.any():
        raise InvalidInput(f"mask_BL masks tokens between others in sequence {int(has_gap_B.int().argmax())}")
    return mask_BL
