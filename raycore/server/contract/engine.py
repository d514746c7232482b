"""What the server needs of an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from raycore.client.ask import Ask
from raycore.client.inputs import ParsedPrompt, PromptImages
from raycore.client.watchers import Watcher
from raycore.config import EngineConfig
from raycore.control.calls import AsyncCalls
from raycore.metrics.view import MetricsView
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.text.tokenizer import Tokenizer


class ServingEngine(AsyncCalls, Protocol):
    """The engine interface that the server uses; `AsyncLLM` implements it."""

    def ask(self, asks: Sequence[Ask]) -> AsyncGenerator[Any, None]:
        """Run requests, and yield their outputs: see `Streams.ask`. All prompts come this way.

        Outputs of a request that generates are cumulative, and the last one is finished.
        """
        ...

    def watch(self, watcher: Watcher) -> None:
        """Have somebody see the requests that come from now on."""
        ...

    def check(self, prompt: ParsedPrompt, params: SamplingParams | PoolingParams) -> None:
        """Raise InvalidRequest if the request could never run, even on an idle engine. Thread-safe."""
        ...

    @property
    def pooling_spec(self) -> PoolingSpec | None:
        """What the model pools, and how; None if it generates."""
        ...

    @property
    def named_prompts(self) -> Mapping[str, str]:
        """What the checkpoint wants before texts, by name, such as `query`. Empty: it says nothing of that."""
        ...

    def get_tokenizer(self) -> Tokenizer: ...

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration."""
        ...

    async def abort_requests(self, request_ids: Sequence[str] | None) -> int:
        """Abort requests of all API servers. None: all of them. Returns how many of the engine's there were.

        Ids are those of the engine's requests, or of responses, whose prompts are requests of their own.
        """
        ...

    @property
    def images(self) -> PromptImages:
        """Makes prompts with images."""
        ...

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """The sampling parameters that the checkpoint sets, for those that a request doesn't set."""
        ...

    @property
    def max_http_logprobs(self) -> int:
        """Maximum number of log probabilities per token that an HTTP request may ask for. -1: no maximum."""
        ...

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a request's prompt and output together."""
        ...

    @property
    def unavailable_reason(self) -> str | None:
        """Why the engine refuses requests; None if it accepts them."""
        ...

    def read_metrics(self) -> MetricsView:
        """The engine's current metrics."""
        ...
