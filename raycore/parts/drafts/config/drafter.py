"""The model that drafts tokens, as it is found in its checkpoint and fits the engine. Does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from raycore.checkpoint.hub_cache import find_directory
from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_eagle3, fit_model, fit_mtp
from raycore.checkpoint.weight_files import has_weight_files
from raycore.errors import InvalidConfig
from raycore.models.spec import ModelSpec
from raycore.parts.drafts.checkpoint.eagle3 import Eagle3Spec, load_eagle3_spec
from raycore.parts.drafts.checkpoint.mtp import MtpSpec, mtp_spec
from raycore.parts.drafts.config.speculative import SpeculativeConfig
from raycore.parts.images.models import without_vision

HeadSpec = Eagle3Spec | MtpSpec
"""What a head has beyond the sizes of its layer. Each has `target_layers`, what it reads of the target."""


class DrafterConfig(msgspec.Struct, frozen=True):
    """A draft model, or a head."""

    path: str
    """The checkpoint's directory."""
    spec: ModelSpec
    """The draft model's, or that of the head's layer."""
    head: HeadSpec | None
    """None: a model of its own."""
    num_speculative_tokens: int
    tensor_parallel_size: int
    """As many workers share the draft model as share the target; or 1: one worker computes it."""
    max_model_len: int
    """Longer sequences have no drafts."""

    def fitted(self) -> DrafterConfig:
        """As `EngineConfig.fitted`."""
        path = Path(self.path)
        if not has_weight_files(path):
            return self
        match self.head:
            case None:
                fit = fit_model(self.spec, path)
            case Eagle3Spec() as head:
                fit = fit_eagle3(self.spec, head, path)
            case MtpSpec() as head:
                fit = fit_mtp(self.spec, head, path)
        return msgspec.structs.replace(self, spec=fit)


def resolve_drafter(
    config: SpeculativeConfig, path: Path, target: ModelSpec, target_len: int, tp_size: int, *, expert_parallel: bool
) -> DrafterConfig:
    """Read the drafting checkpoint's config.json, and check that it can draft for `target`.

    Args:
        path: the directory of the target's checkpoint.
        target_len: maximum number of tokens of a sequence.
        tp_size, expert_parallel: how the target is parallelized.

    Raises:
        InvalidCheckpoint: raycore doesn't support the checkpoint, or its head is for another target.
        InvalidConfig: the settings don't fit. The message names them.
    """
    draft_tp_size = tp_size if config.draft_tensor_parallel_size is None else config.draft_tensor_parallel_size
    if draft_tp_size not in (1, tp_size):
        raise _error(f"draft_tensor_parallel_size={draft_tp_size}: expected 1 or tensor_parallel_size={tp_size}")
    if config.model is not None:
        path = find_directory(config.model, of="the draft model")
    if config.method == "draft_model":
        spec, head = without_vision(load_model_spec(path)), None
        _check_draft_model(path, spec, target, expert_parallel=expert_parallel)
    elif (why := target.why_not("heads")) is not None:
        raise _error(
            f"method={config.method!r} can't be used with {target.architecture}, which {why}: use another method"
        )
    else:
        spec, head = (
            load_eagle3_spec(path, target)
            if config.method == "eagle3"
            else _own_head(path, target, config.num_speculative_tokens)
        )
        if draft_tp_size != tp_size:
            raise _error(
                f"draft_tensor_parallel_size={draft_tp_size}: a head of the target needs the target's "
                f"tensor_parallel_size={tp_size}: omit it"
            )
    spec.check_tensor_parallel(draft_tp_size)
    return DrafterConfig(
        path=os.path.abspath(path),
        spec=spec,
        head=head,
        num_speculative_tokens=config.num_speculative_tokens,
        tensor_parallel_size=draft_tp_size,
        max_model_len=_draft_len(config, spec.max_length if head is None else target_len, target_len),
    )


def _own_head(path: Path, target: ModelSpec, num_tokens: int) -> tuple[ModelSpec, MtpSpec]:
    found = mtp_spec(target, num_tokens)
    if found is not None:
        return found
    why = "has no layer that predicts further tokens"
    if target.num_predictors:
        why = "has layers that predict further tokens, but raycore doesn't compute these"
    raise _error(f"method='mtp', but {path} ({target.architecture}) {why}: use another method")


def _check_draft_model(path: Path, spec: ModelSpec, target: ModelSpec, *, expert_parallel: bool) -> None:
    if spec.vocab_size != target.vocab_size:
        raise _error(
            f"the draft model {path} has vocab_size={spec.vocab_size}, and the target has {target.vocab_size}: "
            "a draft model needs the target's tokenizer"
        )
    why = spec.why_not("draft_model")
    if why is not None:
        raise _error(
            f"the draft model {path} ({spec.architecture}) {why}, which isn't supported: "
            "use a draft model with attention in all layers"
        )
    if expert_parallel and spec.has_experts:
        raise _error(
            f"the draft model {path} ({spec.architecture}) has experts, which can't be used with "
            "enable_expert_parallel=True: use a dense draft model"
        )


def _draft_len(config: SpeculativeConfig, own_len: int, target_len: int) -> int:
    longest = min(own_len, target_len)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise _error(
            f"max_model_len={config.max_model_len} is above {longest}, the maximum of the draft model ({own_len}) and "
            f"of the target ({target_len})"
        )
    return config.max_model_len or longest


def _error(text: str) -> InvalidConfig:
    return InvalidConfig(f"speculative_config: {text}")
