"""Pooling parameters. Names, defaults and meanings are vLLM's, as far as vLLM has them."""

from __future__ import annotations

from copy import deepcopy
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from raycore.sampling_params import RequestOutputKind

PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
"""What a request that pools asks for. `embed` and `classify` give one result for the prompt, `token_embed` and
`token_classify` one for each of its tokens. `score` is `classify` of a pair of texts, with one class."""
InputType = Literal["query", "document"]
"""Which of both a text is, for a model of late interaction, such as ColBERT."""


class _OrderedParams(msgspec.Struct, omit_defaults=True):
    """The parameters that may be given by position, in vLLM's order."""

    use_activation: bool | None = None
    """Whether embeddings are normalized, and classes' logits become probabilities or scores. None: as the pooler's
    configuration says, by default yes."""
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """How many elements of an embedding are kept, the first ones, before it is normalized. None: all."""
    step_tag_id: int | None = None
    """For `token_classify`: only the results of the prompt's tokens with this id are returned. None: of all."""
    returned_token_ids: list[int] | None = None
    """For `token_classify` with a model's head for texts: the tokens whose logits are the classes. None: all."""
    task: PoolingTask | None = None
    """None: the first one that the model supports."""


class PoolingParams(_OrderedParams, kw_only=True, omit_defaults=True):
    """Parameters of one request that pools. Those up to `task` may be given by position, in vLLM's order."""

    skip_reading_prefix_cache: bool | None = None
    """Whether cached prefixes are of no use, because the result needs the hidden states of all tokens. Set by raycore.
    """
    input_type: InputType | None = None
    """Which of both a text is, for models of late interaction, such as ColBERT. None: a document."""
    requires_token_ids: bool = False
    """No effect: results always come with the prompt's tokens."""
    extra_kwargs: dict[str, Any] | None = None
    """Arguments for code that extends raycore: a dict of values as in JSON."""
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    """No effect: a request that pools has one output."""

    def clone(self) -> PoolingParams:
        """A deep copy."""
        return deepcopy(self)
