"""The size of the largest step, and the contract of what tells how much memory a step needs within a layer's mixer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from raycore.models.spec import ModelSpec

FLOAT32_BYTES = 4
INT64_BYTES = 8


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The size of the largest step."""

    num_tokens: int
    num_seqs: int
    max_model_len: int
    block_size: int
    num_samples_per_seq: int = 1
    """Maximum number of tokens that are sampled for a request: one more than it has drafts."""
    num_expert_engines: int = 1
    """Number of engines that share experts. Each of them processes the tokens of all these engines."""
    context_size: int = 1
    """Number of workers that have other tokens' keys and values of the same heads. Each attends to its own."""
    num_query_parts: int = 1
    """How many of these have different query heads."""
    processes_all_logits: bool = False
    """Whether users' logits processors get the logits of all requests at once."""


@dataclass(frozen=True)
class MixerMemory:
    """Upper bounds on what a step needs within layers of one kind of mixer, on one of `tp_size` ranks.

    `MixerSpec.memory` names the class, which is next to what allocates that memory. A test compares the bounds with
    what steps allocate.
    """

    mixer: Any
    """The spec of these layers."""
    spec: ModelSpec
    limits: StepLimits
    tp_size: int
    dtype: torch.dtype
    batch_invariant: bool

    def token_numbers(self, *, is_native: bool) -> int:
        """Return how many numbers of the data type a token has, as far as they exist at the same time.

        `is_native`: whether native kernels compute the layer.
        """
        return 0

    def layer_bytes(self, *, is_native: bool) -> int:
        """Return the bytes within a layer, hidden states included, if `token_numbers` doesn't tell them.

        `is_native`: whether native kernels compute whatever they can.
        """
        return 0

    def exchanged_bytes(self) -> int:
        """Return the bytes of what workers with other tokens' keys and values exchange in a layer."""
        return 0

    def attention_bytes(self, windows: Collection[int | None]) -> int:
        """Return the bytes that attention in plain torch needs besides, scratch memory included.

        `windows`: those of the parts of attention, each of which has masks of its own.
        """
        return 0

    def scratch_bytes(self) -> int:
        """Return the bytes of the scratch memory of attention in plain torch, which is kept between steps."""
        return 0
