"""Logs requests and their outputs."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from raycore.client.ask import Ask
from raycore.client.watchers import Note, Watcher
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.pooling_params import PoolingParams
from raycore.text.tokenizer import Tokenizer

logger = logging.getLogger("raycore.server.request_log")
"""Has the name that users' logging configurations and `raycore simulate` know."""

_Cut = TypeVar("_Cut", str, list[int])


class RequestLog(Watcher):
    """Logs the requests of an engine."""

    def __init__(
        self, tokenizer: Tokenizer, *, outputs: bool = False, deltas: bool = False, max_len: int | None = None
    ) -> None:
        """
        Args:
            tokenizer: for the texts of prompts, which are logged at level debug.
            outputs: log outputs, too.
            deltas: with `outputs`: log each part of a stream, too.
            max_len: maximum number of characters of a text, and of token ids, that are logged. None: all.
        """
        self._tokenizer = tokenizer
        self._logs_outputs = outputs
        self._logs_deltas = self.needs_all_tokens = outputs and deltas
        self._max_len = max_len

    @contextmanager
    def watching(self, asks: Sequence[Ask]) -> Generator[Note]:
        for ask in asks:
            self._log_request(ask)
        logged: dict[int, tuple[int, int]] = {}  # by sequence: how many characters and tokens of it
        last: RequestOutput | None = None
        first = asks[0]

        def note(output: RequestOutput) -> None:
            nonlocal last
            last = output
            if first.stream and self._logs_deltas:
                for each in output.outputs:
                    num_characters, num_tokens = logged.get(each.index, (0, 0))
                    text, token_ids = each.text[num_characters:], each.token_ids[num_tokens:]
                    logged[each.index] = len(each.text), len(each.token_ids)
                    if token_ids:
                        self._log_output("part", first, each, text, token_ids, each.finish_reason)

        try:
            yield note
        finally:
            if last is not None and self._logs_outputs and not isinstance(first.params, PoolingParams):
                for each in last.outputs:
                    reason = each.finish_reason or "abort"
                    self._log_output("output", first, each, each.text, each.token_ids, reason)

    def _log_request(self, ask: Ask) -> None:
        token_ids = ask.parsed.token_ids
        adapter = None if ask.lora is None else ask.lora.lora_name
        logger.info("request %s: %d prompt tokens, %s, adapter %s", ask.request_id, len(token_ids), ask.params, adapter)
        if logger.isEnabledFor(logging.DEBUG):
            (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)
            logger.debug("request %s: prompt %r, token ids %s", ask.request_id, self._cut(text), self._cut(token_ids))

    def _log_output(
        self,
        what: str,
        ask: Ask,
        output: CompletionOutput,
        text: str,
        token_ids: list[int],
        reason: str | None,
    ) -> None:
        args = ask.request_id, what, output.index
        size = len(token_ids)
        logger.info("request %s: %s %d of %d tokens %r, finish reason %s", *args, size, self._cut(text), reason)
        logger.debug("request %s: %s %d, token ids %s", *args, self._cut(token_ids))

    def _cut(self, given: _Cut) -> _Cut:
        return given[: self._max_len]
