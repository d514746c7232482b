"""What callers of an engine ask of its client and of its configuration, wherever the client is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from raycore.checkpoint.sentence_transformers import read_prompts
from raycore.client.client import EngineClient
from raycore.client.inputs import ParsedPrompt, PromptImages
from raycore.config import EngineConfig
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.text.tokenizer import Tokenizer


class EngineFacts(Protocol):
    """What an engine is, as far as its client knows. Nothing here asks the ranks."""

    config: EngineConfig
    _client: EngineClient

    def get_tokenizer(self) -> Tokenizer:
        """The engine's tokenizer."""
        return self._client.tokenizer

    @property
    def images(self) -> PromptImages:
        """Makes prompts with images."""
        return self._client.images

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """The sampling parameters that the checkpoint's generation_config.json sets, by their names in
        `SamplingParams`."""
        return self.config.model.default_sampling_params

    @property
    def pooling_spec(self) -> PoolingSpec | None:
        """What the model pools, with its tasks and classes. None: it generates."""
        return self._client.checks.pooling

    @property
    def named_prompts(self) -> Mapping[str, str]:
        """What the checkpoint wants before texts that are pooled, by name, such as `query`. Mostly empty."""
        return read_prompts(Path(self.config.model.model))

    @property
    def max_http_logprobs(self) -> int:
        """Maximum number of log probabilities per token that an HTTP request may ask for. -1: no maximum."""
        return self.config.model.max_http_logprobs

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its output together."""
        return self._client.checks.max_model_len

    @property
    def unavailable_reason(self) -> str | None:
        """Why the engine refuses requests; None if it accepts them. Does no I/O."""
        return self._client.unavailable_reason

    def check(self, prompt: ParsedPrompt, params: SamplingParams | PoolingParams) -> None:
        """Raise InvalidRequest if the request could never run. Doesn't submit it. Thread-safe."""
        self._client.checks.check(prompt, params)
