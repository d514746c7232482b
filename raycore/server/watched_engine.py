"""An engine whose requests are watched: the request log and traces derive from it.

The calls that take prompts are declared here once, for all who watch. A test fails if the engine's interface has one
that isn't here. All other calls are the engine's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import Any

from raycore.beam_search import BeamSearchParams
from raycore.client.updates import Streaming
from raycore.lora.request import LoRARequest
from raycore.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.server.generation import ServingEngine


@dataclass(frozen=True)
class Asked:
    """What a call asks the engine for."""

    prompts: Sequence[Any]
    request_ids: Sequence[str | None]
    """One for each prompt."""
    params: SamplingParams | BeamSearchParams | PoolingParams | None
    lora: LoRARequest | None
    is_streamed: bool = False
    """Whether the call yields outputs before the last one."""


class WatchedEngine(ABC):
    """An engine, and what a subclass does around each call that takes prompts."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @abstractmethod
    def _generation(self, asked: Asked) -> AbstractContextManager[Callable[[RequestOutput], None]]:
        """Watch a call that generates. Yields what is called with each of its outputs, which are cumulative."""

    @abstractmethod
    def _pooling(
        self, asked: Asked
    ) -> AbstractContextManager[Callable[[list[PoolingRequestOutput[PoolingOutput]]], None]]:
        """Watch a call that pools. Yields what is called with its results."""

    def _streaming(self, stream: Streaming) -> Streaming:
        """Which outputs the engine yields, if the caller asks for `stream`."""
        return stream

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        stream: Streaming = True,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        asked = Asked([prompt], [request_id], sampling_params, lora_request, bool(stream))
        with self._generation(asked) as note:
            outputs = self._engine.generate(
                prompt,
                sampling_params,
                request_id,
                priority,
                stream=self._streaming(stream),
                data_parallel_rank=data_parallel_rank,
                lora_request=lora_request,
            )
            async with aclosing(outputs):
                async for output in outputs:
                    note(output)
                    yield output

    async def beam_search(
        self,
        prompt: Any,
        params: BeamSearchParams,
        request_id: str | None = None,
        priority: int = 0,
        *,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        with self._generation(Asked([prompt], [request_id], params, lora_request)) as note:
            output = await self._engine.beam_search(
                prompt,
                params,
                request_id,
                priority,
                data_parallel_rank=data_parallel_rank,
                lora_request=lora_request,
            )
            note(output)
            return output

    async def encode_all(
        self,
        prompts: Sequence[Any],
        pooling_params: PoolingParams | None = None,
        request_ids: Sequence[str] | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        *,
        data_parallel_rank: int | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        asked = Asked(prompts, request_ids or [None] * len(prompts), pooling_params, lora_request)
        with self._pooling(asked) as note:
            results = await self._engine.encode_all(
                prompts, pooling_params, request_ids, lora_request, priority, data_parallel_rank=data_parallel_rank
            )
            note(results)
            return results
