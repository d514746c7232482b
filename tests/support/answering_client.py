"""A client whose ranks answer at once, and an engine that uses it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from raycore import AsyncLLM, PoolingParams
from raycore.client.ask import Ask
from raycore.client.beams import BeamSearch
from raycore.client.inputs import OnlyText
from raycore.client.request_state import PooledOutput
from raycore.client.reserved_ids import ReservedIds
from raycore.client.streams import Streams
from raycore.client.updates import Sink, Update
from raycore.client.watchers import Watchers
from raycore.outputs import CompletionOutput, Logprob, RequestOutput

POOLS = PoolingParams(task="embed")


class AnsweringClient:
    """Answers each request at once, or with an error."""

    stream_interval = 1
    images: Any = OnlyText()
    max_model_len = 100
    adapters: Any = ()

    def __init__(self, tokenizer: Any, error: Exception | None = None) -> None:
        self.tokenizer = tokenizer
        self.reserved = ReservedIds()
        self.watchers = Watchers()
        self.error = error

    @property
    def checks(self) -> Any:
        return self

    def knows_structured_outputs(self, params: object) -> bool:
        return True

    def resolved_pooling(self, params: object, task: str | None = None) -> PoolingParams:
        return POOLS

    def beam_search(self, ask: Ask) -> BeamSearch:
        return BeamSearch(ask, [0], 9, self.max_model_len)

    def submit(self, asks: Sequence[Ask], sink: Sink) -> None:
        for ask in asks:
            output: RequestOutput | None = None
            if isinstance(ask.params, PoolingParams):
                output = PooledOutput(ask.request_id, None, [1, 2], finished=True, data=np.zeros(1, np.float32))
            elif self.error is None:
                part = CompletionOutput(0, "x", [5], logprobs=[{5: Logprob(-1.0, 1, "x")}], finish_reason="length")
                output = RequestOutput(ask.request_id, None, [1, 2], outputs=[part], finished=True)
            sink([Update(ask.request_id, None if self.error else output, self.error)])

    def abort(self, request_ids: Sequence[str], notify: bool = False) -> None:
        pass


def engine(client: AnsweringClient) -> AsyncLLM:
    llm = object.__new__(AsyncLLM)
    llm._client, llm._streams = client, Streams(client)  # pyright: ignore
    llm.config = SimpleNamespace(model=SimpleNamespace(default_sampling_params={}))  # pyright: ignore
    return llm
