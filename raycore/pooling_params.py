"""Pooling parameters. Names, defaults and meanings are vLLM's, as far as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
"""What a request that pools asks for. `embed` and `classify` give one result for the prompt, `token_embed` and
`token_classify` one for each of its tokens. `score` is `classify` of a pair of texts, with one class."""


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Parameters of one request that pools."""

    task: PoolingTask | None = None
    """None: the first one that the model supports."""
    use_activation: bool | None = None
    """Whether embeddings are normalized, and classes' logits become probabilities or scores. None: as the pooler's
    configuration says, by default yes."""
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """How many elements of an embedding are kept, the first ones, before it is normalized. None: all."""
    step_tag_id: int | None = None
    """For `token_classify`: only the results of the prompt's tokens with this id are returned. None: of all."""
    returned_token_ids: list[int] | None = None
    """For `token_classify` with a model's head for texts: the tokens whose logits are the classes. None: all."""
    skip_reading_prefix_cache: bool | None = None
    """Whether cached prefixes are of no use, because the result needs the hidden states of all tokens. Set by raycore.
    """
