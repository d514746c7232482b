"""The types of prompts: mappings that `LLM.generate` and the other calls take instead of a text or token ids."""

from __future__ import annotations

__all__ = [
    "EmbedsPrompt",
    "ExplicitEncoderDecoderPrompt",
    "PromptType",
    "StreamingInput",
    "TextPrompt",
    "TokensPrompt",
]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from raycore.sampling_params import SamplingParams


class _PromptOptions(TypedDict, total=False):
    multi_modal_data: Mapping[str, Any] | None
    """Images: `{"image": image}` (docs/images.md)."""
    mm_processor_kwargs: dict[str, Any] | None
    """Settings of the image processor."""
    multi_modal_uuids: Mapping[str, Any] | None
    """Names of the images: `{"image": ["name"]}`."""
    media_io_kwargs: dict[str, dict[str, Any]] | None
    """How images are read."""
    cache_salt: str | None
    """Cached prefixes are shared only among prompts with the same salt."""


class TextPrompt(_PromptOptions):
    """A text."""

    prompt: str


class _TokensOptions(_PromptOptions, total=False):
    prompt: str | None
    """The text that outputs show as the prompt. The token ids count."""
    token_type_ids: list[int] | None
    """One of a pair of texts: 0 for the tokens of the first text, then 1 for those of the second."""


class TokensPrompt(_TokensOptions):
    """Token ids."""

    prompt_token_ids: list[int]


class _EmbedsOptions(_PromptOptions, total=False):
    prompt: str | None
    """The text that outputs show as the prompt."""
    prompt_token_ids: list[int] | None
    """The token of each embedding, for what depends on tokens, such as penalties. None: they are unknown."""
    prompt_is_token_ids: list[bool] | None
    """For each position, whether the token counts instead of the embedding. None: all embeddings count."""


class EmbedsPrompt(_EmbedsOptions):
    """Embeddings of tokens. Needs an engine with `enable_prompt_embeds`."""

    prompt_embeds: Tensor | NDArray[np.floating[Any]]
    """Floats of [number of tokens, hidden size]."""


class ExplicitEncoderDecoderPrompt(TypedDict):
    """For models that encode one text and decode another. raycore has none, and refuses such prompts."""

    encoder_prompt: Any
    decoder_prompt: Any


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | EmbedsPrompt


@dataclass
class StreamingInput:
    """A piece of a prompt that comes as a stream: see `AsyncLLM.generate()`."""

    prompt: PromptType
    """What follows the prompt so far: a text, token ids, or a mapping with one of them."""
    sampling_params: SamplingParams | None = None
    """How the prompt so far is continued. None: as the call says."""
