"""Logs requests to the model and their outputs, if the server's options say so."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from raycore.client.inputs import ParsedPrompt
from raycore.client.updates import Streaming
from raycore.lora.request import LoRARequest
from raycore.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.server.generation import Progress, ServingEngine
from raycore.server.log_options import LogOptions

logger = logging.getLogger(__name__)

_Cut = TypeVar("_Cut", str, list[int])


class LoggedEngine:
    """An engine whose requests are logged. Everything but requests is the engine's own."""

    def __init__(self, engine: ServingEngine, options: LogOptions) -> None:
        self._engine = engine
        self._options = options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

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
        self._log_request(request_id, sampling_params, lora_request, prompt)
        logs_deltas = bool(stream) and self._options.enable_log_outputs and self._options.enable_log_deltas
        outputs = self._engine.generate(
            prompt,
            sampling_params,
            request_id,
            priority,
            stream=True if logs_deltas else stream,
            data_parallel_rank=data_parallel_rank,
            lora_request=lora_request,
        )
        progress: dict[int, Progress] = {}
        last: RequestOutput | None = None
        try:
            async with aclosing(outputs):
                async for last in outputs:
                    if logs_deltas:
                        for each in last.outputs:
                            new = progress.setdefault(each.index, Progress()).advance(each)
                            if new.token_ids:
                                self._log_output("part", request_id, each, new.text, new.token_ids, new.finish_reason)
                    yield last
        finally:
            if last is not None and self._options.enable_log_outputs:
                for each in last.outputs:
                    reason = each.finish_reason or "abort"
                    self._log_output("output", request_id, each, each.text, each.token_ids, reason)

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
        for request_id, prompt in zip(request_ids or [None] * len(prompts), prompts, strict=True):
            self._log_request(request_id, pooling_params, lora_request, prompt)
        return await self._engine.encode_all(
            prompts, pooling_params, request_ids, lora_request, priority, data_parallel_rank=data_parallel_rank
        )

    def _log_request(self, request_id: str | None, params: object, lora: LoRARequest | None, prompt: Any) -> None:
        logger.info("request %s: %s, adapter %s", request_id, params, None if lora is None else lora.lora_name)
        if logger.isEnabledFor(logging.DEBUG):
            token_ids = prompt.token_ids if isinstance(prompt, ParsedPrompt) else prompt["prompt_token_ids"]
            (text,) = self._engine.get_tokenizer().decode_batch([token_ids], skip_special_tokens=False)
            logger.debug("request %s: prompt %r, token ids %s", request_id, self._cut(text), self._cut(token_ids))

    def _log_output(
        self,
        what: str,
        request_id: str | None,
        output: CompletionOutput,
        text: str,
        token_ids: list[int],
        reason: str | None,
    ) -> None:
        args = request_id, what, output.index
        logger.info("request %s: %s %d %r, finish reason %s", *args, self._cut(text), reason)
        logger.debug("request %s: %s %d, token ids %s", *args, self._cut(token_ids))

    def _cut(self, given: _Cut) -> _Cut:
        return given[: self._options.max_log_len]
