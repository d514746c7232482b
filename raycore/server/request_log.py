"""Logs requests to the model and their outputs, if the server's options say so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from raycore.client.inputs import ParsedPrompt
from raycore.client.updates import Streaming
from raycore.lora.request import LoRARequest
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.server.generation import Progress, ServingEngine
from raycore.server.log_options import LogOptions
from raycore.server.watched_engine import Asked, WatchedEngine

logger = logging.getLogger(__name__)

_Cut = TypeVar("_Cut", str, list[int])


class LoggedEngine(WatchedEngine):
    """An engine whose requests are logged."""

    def __init__(self, engine: ServingEngine, options: LogOptions) -> None:
        super().__init__(engine)
        self._options = options

    def _streaming(self, stream: Streaming) -> Streaming:
        return True if stream and self._logs_deltas else stream

    @contextmanager
    def _generation(self, asked: Asked) -> Generator[Callable[[RequestOutput], None]]:
        self._log_requests(asked)
        (request_id,) = asked.request_ids
        logs_parts = asked.is_streamed and self._logs_deltas
        progress: dict[int, Progress] = {}
        last: RequestOutput | None = None

        def note(output: RequestOutput) -> None:
            nonlocal last
            last = output
            if logs_parts:
                for each in output.outputs:
                    new = progress.setdefault(each.index, Progress()).advance(each)
                    if new.token_ids:
                        self._log_output("part", request_id, each, new.text, new.token_ids, new.finish_reason)

        try:
            yield note
        finally:
            if last is not None and self._options.enable_log_outputs:
                for each in last.outputs:
                    reason = each.finish_reason or "abort"
                    self._log_output("output", request_id, each, each.text, each.token_ids, reason)

    @contextmanager
    def _pooling(self, asked: Asked) -> Generator[Callable[[object], None]]:
        self._log_requests(asked)
        yield lambda results: None

    @property
    def _logs_deltas(self) -> bool:
        return self._options.enable_log_outputs and self._options.enable_log_deltas

    def _log_requests(self, asked: Asked) -> None:
        for request_id, prompt in zip(asked.request_ids, asked.prompts, strict=True):
            self._log_request(request_id, asked.params, asked.lora, prompt)

    def _log_request(self, request_id: str | None, params: object, lora: LoRARequest | None, prompt: Any) -> None:
        token_ids = prompt.token_ids if isinstance(prompt, ParsedPrompt) else prompt["prompt_token_ids"]
        adapter = None if lora is None else lora.lora_name
        logger.info("request %s: %d prompt tokens, %s, adapter %s", request_id, len(token_ids), params, adapter)
        if logger.isEnabledFor(logging.DEBUG):
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
        size = len(token_ids)
        logger.info("request %s: %s %d of %d tokens %r, finish reason %s", *args, size, self._cut(text), reason)
        logger.debug("request %s: %s %d, token ids %s", *args, self._cut(token_ids))

    def _cut(self, given: _Cut) -> _Cut:
        return given[: self._options.max_log_len]
