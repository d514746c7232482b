"""The engine's interface for an API server: the server's process reaches the ranks through a client of its own."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raycore.checkpoint.sentence_transformers import read_prompts
from raycore.client.ask import Ask
from raycore.client.client import EngineClient
from raycore.client.inputs import ParsedPrompt, PromptImages
from raycore.client.pooling import PLACEHOLDER, supported_tasks
from raycore.client.streams import Streams
from raycore.client.watchers import Watcher
from raycore.config import EngineConfig
from raycore.control.calls import AsyncCalls
from raycore.messages import Feature
from raycore.metrics.view import MetricsView
from raycore.models.pooling import PoolingSpec
from raycore.own_process import OwnProcess
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.server.http_counts import HttpCounts
from raycore.server.multi_process.driver_calls import READ_METRICS, DriverCalls
from raycore.text.tokenizer import Tokenizer

_METRICS_TIMEOUT_S = 30.0


class ClientEngine(OwnProcess, AsyncCalls):
    """A `ServingEngine` for the ranks of an engine that another process, the driver, has created.

    The driver makes the calls on the engine.
    """

    def __init__(self, config: EngineConfig, client: EngineClient, driver: DriverCalls) -> None:
        self._config = config
        self._client = client
        self._driver = driver
        self._streams = Streams(client)
        self.on_http_counts: Callable[[HttpCounts], object] = lambda counts: None
        """Gets the sum of all API servers' HTTP counts whenever the metrics are read."""

    def ask(self, asks: Sequence[Ask]) -> AsyncGenerator[Any, None]:
        return self._streams.ask(asks)

    def watch(self, watcher: Watcher) -> None:
        self._streams.watchers.add(watcher)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return supported_tasks(self._client.checks.pooling)

    def check_pooling(self, prompt_token_ids: list[int], pooling_params: PoolingParams | None = None) -> None:
        resolved = self._client.checks.resolved_pooling(pooling_params)
        self._client.checks.check(ParsedPrompt(None, prompt_token_ids), PLACEHOLDER, resolved)

    @property
    def pooling_spec(self) -> PoolingSpec | None:
        """What the model pools, with its tasks and classes. None: it generates."""
        return self._client.checks.pooling

    @property
    def named_prompts(self) -> Mapping[str, str]:
        """What the checkpoint wants before texts that are pooled, by name, such as `query`. Mostly empty."""
        return read_prompts(Path(self._config.model.model))

    def check(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, features: Sequence[Feature] = ()
    ) -> None:
        self._client.checks.check(ParsedPrompt(None, prompt_token_ids, features=features), sampling_params)

    @property
    def images(self) -> PromptImages:
        """Makes prompts with images."""
        return self._client.images

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration."""
        return self._config

    async def abort_requests(self, request_ids: Sequence[str] | None) -> int:
        return await self._driver.call("abort_requests", request_ids=request_ids)

    def read_metrics(self) -> MetricsView:
        """The metrics of the whole engine, of all API servers. Those of others may be a few seconds old.

        Asks the driver, and waits for its answer, so don't call this on an event loop. Raises TimeoutError if there is
        none within 30 s.
        """
        metrics, counts = self._driver.call_and_wait(READ_METRICS, _METRICS_TIMEOUT_S)
        self.on_http_counts(counts)
        return metrics

    def trace_requests(self) -> None:
        self._client.trace_requests()

    def get_tokenizer(self) -> Tokenizer:
        """The engine's tokenizer."""
        return self._client.tokenizer

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """The sampling parameters that the checkpoint sets, for those that a request doesn't set."""
        return self._config.model.default_sampling_params

    @property
    def max_http_logprobs(self) -> int:
        """Maximum number of log probabilities per token that an HTTP request may ask for. -1: no maximum."""
        return self._config.model.max_http_logprobs

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a request's prompt and output together."""
        return self._client.checks.max_model_len

    @property
    def unavailable_reason(self) -> str | None:
        """Why the engine refuses requests; None if it accepts them."""
        return self._client.unavailable_reason

    async def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(call).bind_partial(None, *args, **kwargs).arguments
        del arguments["self"]
        return await self._driver.call(call.__name__, **arguments)
