"""Log probabilities for a trainer, with the bits of those that an engine sampled with.

An engine with `batch_invariant=True` computes a token's logits in the same order whatever else its steps compute, on
1, 2 or 4 tensor-parallel ranks. `logprobs` does so in the trainer's own process, without Ray. So a policy gradient
needs no importance weights for rounding. Shape suffixes: B rows, L tokens.
"""

from __future__ import annotations

# torch's tensors are partially typed:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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


def logprobs(
    model: nn.Module,
    ids_BL: Tensor,
    mask_BL: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return the natural logarithm of each token's probability after the tokens before it.

    The numbers are those that an engine with `batch_invariant=True` returns for the model's weights, to the bit on
    processors of the same kind. Where gradients are enabled, those are of what the model itself computes.

    If torch's `fully_shard` has divided the model's parameters among processes, all of them call this equally often,
    each with rows of its own. Each process has a whole copy of the weights then, beside its shards.

    Args:
        model: a network of transformers' that raycore has, on the CPU. Its weights are read in each call.
        ids_BL: tokens, int64[B, L].
        mask_BL: which of the tokens belong to the sequences, bool or int64[B, L]; those of a sequence must be
            neighbors. None: all.
        position_ids: int64[B, L], if rows are packed, as transformers' models take them: each token's position in its
            sequence. A sequence begins wherever it is 0. None: each row has one sequence.
        options: engine options that the rollouts' engine has, such as `dtype` and `attention_backend`, but none that
            divides the model among workers.

    Returns:
        float32[B, L - 1]: those of `ids_BL[:, 1:]`, and 0 where a token or the one before it is masked, or a sequence
        begins.

    Raises:
        InvalidInput: `ids_BL`, `mask_BL` or `position_ids` is of another shape, masked tokens are between others of
            their sequence, or positions aren't those of sequences.
        InvalidCheckpoint: raycore doesn't have such a model.
        InvalidConfig: an option is invalid.
    """
    mask_BL = _checked(ids_BL, mask_BL)
    sequences = _sequences(mask_BL, position_ids)
    by_options = _scorers.setdefault(model, {})
    key = tuple(sorted(options.items()))
    num_threads = torch.get_num_threads()
    try:
        if key not in by_options:
            by_options[key] = _Scorer(model, options)
        found_BL = by_options[key].score(model, ids_BL, sequences)
    finally:
        torch.set_num_threads(num_threads)  # the engine chooses its own
    if not torch.is_grad_enabled():
        return found_BL
    is_scored_BL = torch.zeros_like(found_BL, dtype=torch.bool)
    for row, start, end in sequences:
        is_scored_BL[row, start : end - 1] = True
    if position_ids is None:
        given = {"attention_mask": mask_BL.long()}
    else:  # masked tokens become sequences of one token; with a cache, transformers would take a row for one sequence
        given = {"position_ids": position_ids * mask_BL, "use_cache": False}
    logits_BLV = model(input_ids=ids_BL, **given).logits[:, :-1].float()
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
        # if it was never saved; `fully_shard` has made a class of torch's of the model's
        own = next(each for each in type(model).__mro__ if not each.__module__.startswith("torch."))
        config.architectures = config.architectures or [own.__name__]
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            given: dict[str, Any] = {
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "enable_prefix_caching": False,
            } | options
            resolved = resolve(Path(folder), batch_invariant=True, **given)
            self._core = EngineCore(resolved, InlineExecutor(resolved, RankIdentity(0, 1)))

    def score(self, model: nn.Module, ids_BL: Tensor, sequences: Sequence[_Place]) -> Tensor:
        """Return what `logprobs` does."""
        max_model_len = self._core.config.scheduler.max_model_len
        for index, (_, start, end) in enumerate(sequences):
            if end - start >= max_model_len:
                raise InvalidInput(
                    f"sequence {index} has {end - start} tokens: with max_model_len={max_model_len}, it may have "
                    f"{max_model_len - 1}"
                )
        # a tensor at a time, because those of shards are made whole
        weights = ((name, _whole(weight.detach())) for name, weight in model.state_dict().items())
        self._core.executor.collective_rpc("load_weights", args=(weights,))
        found_BL = torch.zeros(len(ids_BL), ids_BL.shape[1] - 1)
        for index, (row, start, end) in enumerate(sequences):
            if end - start > 1:
                tokens: list[int] = ids_BL[row, start:end].tolist()
                self._core.submit(EngineRequest(index, str(index), tokens, _NO_TOKEN, seed=0))
        while self._core.has_work():
            outputs = self._core.step()
            for index, first, entries in () if outputs is None else outputs.prompt_logprobs:
                row, start = sequences[index].row, sequences[index].start + first - 1
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
    return mask_BL.bool()


class _Place(NamedTuple):
    """Where a sequence is."""

    row: int
    start: int
    end: int


def _sequences(mask_BL: Tensor, position_ids: Tensor | None) -> list[_Place]:
    """Return the sequences in the order of their tokens."""
    if position_ids is not None and (position_ids.shape != mask_BL.shape or position_ids.dtype != torch.int64):
        raise InvalidInput(
            f"position_ids is {position_ids.dtype}{list(position_ids.shape)}, and ids_BL of {list(mask_BL.shape)}"
        )
    before_BL = torch.cat([torch.zeros_like(mask_BL[:, :1]), mask_BL[:, :-1]], dim=1)
    after_BL = torch.cat([mask_BL[:, 1:], torch.zeros_like(mask_BL[:, :1])], dim=1)
    begins_BL, ends_BL = mask_BL & ~before_BL, mask_BL & ~after_BL
    if position_ids is None:
        has_gap_B = begins_BL.sum(dim=1) > 1
        if has_gap_B.any():
            raise InvalidInput(f"mask_BL masks tokens between others in sequence {int(has_gap_B.int().argmax())}")
    else:
        is_first_BL = mask_BL & (position_ids == 0)
        follows_BL = torch.zeros_like(mask_BL)
        follows_BL[:, 1:] = position_ids[:, 1:] == position_ids[:, :-1] + 1
        is_wrong_BL = mask_BL & ~is_first_BL & (begins_BL | ~follows_BL)
        if is_wrong_BL.any():
            row, index = is_wrong_BL.nonzero()[0].tolist()
            raise InvalidInput(
                f"position_ids has {int(position_ids[row, index])} at token {index} of row {row}: a sequence's begin "
                "at 0, and each is one more than that of the token before"
            )
        begins_BL = is_first_BL
        ends_BL |= mask_BL & torch.cat([is_first_BL[:, 1:], torch.zeros_like(mask_BL[:, :1])], dim=1)
    firsts, lasts = begins_BL.nonzero().tolist(), ends_BL.nonzero().tolist()
    return [_Place(row, start, last + 1) for (row, start), (_, last) in zip(firsts, lasts, strict=True)]


def _whole(weight: Tensor) -> Tensor:
    """Return the tensor of which this process may have a shard. Then all processes call this."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
