"""The engine's interface for an API server: the server's process reaches the ranks through a client of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from raycore.activity import PauseMode
from raycore.client.client import EngineClient
from raycore.client.inputs import ParsedPrompt
from raycore.client.streams import Streams
from raycore.config import EngineConfig
from raycore.lora.request import LoRARequest
from raycore.metrics.view import MetricsView
from raycore.outputs import RequestOutput
from raycore.sampling_params import SamplingParams
from raycore.server.multi_process.driver_calls import DriverCalls
from raycore.text.tokenizer import Tokenizer


class ClientEngine:
    """A `ServingEngine` for the ranks of an engine that another process, the driver, has created."""

    def __init__(self, config: EngineConfig, client: EngineClient, driver: DriverCalls) -> None:
        self._config = config
        self._client = client
        self._driver = driver
        self._streams = Streams(client)
        self.metrics = MetricsView([], {}, [], 0)
        """Metrics of the whole engine, as last received from the driver."""

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        stream: bool = True,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `AsyncLLM.generate`."""
        params = sampling_params or SamplingParams(**self.default_sampling_params)
        return self._streams.generate(
            prompt,
            params,
            request_id,
            priority,
            stream=stream,
            data_parallel_rank=data_parallel_rank,
            lora_request=lora_request,
        )

    def check(self, prompt_token_ids: list[int], sampling_params: SamplingParams) -> None:
        """See `AsyncLLM.check`."""
        self._client.check(ParsedPrompt(None, prompt_token_ids), sampling_params)

    def read_metrics(self) -> MetricsView:
        """The metrics of the whole engine, of all API servers. They may be a few seconds old."""
        return self.metrics

    def trace_requests(self) -> None:
        """See `AsyncLLM.trace_requests`."""
        self._client.trace_requests()

    def get_tokenizer(self) -> Tokenizer:
        """The engine's tokenizer."""
        return self._client.tokenizer

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """The sampling parameters that the checkpoint sets, for those that a request doesn't set."""
        return self._config.model.default_sampling_params

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a request's prompt and output together."""
        return self._client.max_model_len

    @property
    def unavailable_reason(self) -> str | None:
        """Why the engine refuses requests; None if it accepts them."""
        return self._client.unavailable_reason

    # ---- calls on all ranks: the driver makes them

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """See `LLM.pause_generation`."""
        await self._driver.call("pause_generation", mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """See `LLM.resume_generation`."""
        await self._driver.call("resume_generation")

    async def is_paused(self) -> bool:
        """See `LLM.is_paused`."""
        return await self._driver.call("is_paused")

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """See `LLM.sleep`."""
        await self._driver.call("sleep", level=level, mode=mode)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """See `LLM.wake_up`."""
        return await self._driver.call("wake_up", tags=tags)

    async def is_sleeping(self) -> bool:
        """See `LLM.is_sleeping`."""
        return await self._driver.call("is_sleeping")

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See `LLM.reset_prefix_cache`."""
        return await self._driver.call(
            "reset_prefix_cache", reset_running_requests=reset_running_requests, reset_connector=reset_connector
        )

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """See `LLM.start_profile`."""
        await self._driver.call(
            "start_profile",
            profile_prefix=profile_prefix,
            delay_iterations=delay_iterations,
            max_iterations=max_iterations,
        )

    async def stop_profile(self) -> None:
        """See `LLM.stop_profile`."""
        await self._driver.call("stop_profile")
