"""The options of models that take more than text."""

from __future__ import annotations

import msgspec


class EncoderLimits(msgspec.Struct, frozen=True):
    """What an engine can do with the features of prompts, such as images, in a step."""

    cache_size: int
    """Maximum number of embeddings that a step computes, and that a worker keeps."""
    max_feature_tokens: int
    """Maximum number of tokens of one feature. At most `cache_size`."""
    is_divisible: bool = True
    """Whether several steps may compute the tokens of one feature."""
