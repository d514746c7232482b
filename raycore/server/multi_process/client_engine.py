"""An engine that another program supervises, as a server sees it: through a client of its own. Knows no Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from raycore.client.client import EngineClient
from raycore.client.inputs import ParsedPrompt
from raycore.client.streams import Streams
from raycore.config import EngineConfig
from raycore.metrics.view import MetricsView
from raycore.outputs import RequestOutput
from raycore.sampling_params import SamplingParams
from raycore.text.tokenizer import Tokenizer


class ClientEngine:
    """A `ServingEngine`."""

    def __init__(self, config: EngineConfig, client: EngineClient) -> None:
        self._config = config
        self._client = client
        self._streams = Streams(client)
        self.metrics = MetricsView([], {}, [], 0)
        """Of the whole engine, as its program last told."""

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        stream: bool = True,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `AsyncLLM.generate`."""
        params = sampling_params or SamplingParams(**self.default_sampling_params)
        return self._streams.generate(
            prompt, params, request_id, priority, stream=stream, data_parallel_rank=data_parallel_rank
        )

    def check(self, prompt_token_ids: list[int], sampling_params: SamplingParams) -> None:
        """See `AsyncLLM.check`."""
        self._client.check(ParsedPrompt(None, prompt_token_ids), sampling_params)

    def read_metrics(self) -> MetricsView:
        """The whole engine's numbers, whichever server has the requests, some seconds old."""
        return self.metrics

    def trace_requests(self) -> None:
        """See `AsyncLLM.trace_requests`."""
        self._client.trace_requests()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer in use."""
        return self._client.tokenizer

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """What the checkpoint sets where a request doesn't."""
        return self._config.model.default_sampling_params

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together, at most."""
        return self._client.max_model_len

    @property
    def unavailable_reason(self) -> str | None:
        """Why it takes no requests; None when it does."""
        return self._client.unavailable_reason
