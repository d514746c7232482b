"""A `ServingEngine` and `TraceableEngine` without ranks: continues every prompt with a fixed text, token by token.

The real `OutputProcessor` turns the tokens into outputs.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from asks import checked
from configs import make_config
from metric_views import make_view
from msgspec.structs import replace
from numpy.typing import NDArray

from raycore.activity import PauseMode
from raycore.beam_search import BeamSearchParams
from raycore.client.ask import Ask
from raycore.client.inputs import OnlyText, ParsedPrompt, PromptImages, parse_prompts
from raycore.client.output_processor import OutputProcessor
from raycore.client.part import OutputPart
from raycore.client.watchers import Watcher, Watchers
from raycore.config import EngineConfig, resolve
from raycore.config.profiler import checked_prefix
from raycore.control.calls import AsyncCalls
from raycore.demo import demo_model_path
from raycore.errors import EngineDeadError, InvalidAdapter, InvalidInput, InvalidRequest
from raycore.lora.request import LoRARequest
from raycore.messages import FinishedRequest, OutputBatch, TokenLogprobs
from raycore.metrics.view import MetricsView
from raycore.outputs import CompletionOutput, Logprob, PoolingOutput, PoolingRequestOutput, RequestOutput
from raycore.parts.pooling.client.pooling import PLACEHOLDER, resolved
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.parts.traces.client.traces import NO_TRACES, Traces
from raycore.parts.transfers.client.params import params_check
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.scheduler.request import RequestLimits
from raycore.text.tokenizer import Tokenizer

EMBEDS = PoolingSpec(tasks=["embed", "token_embed"], embedding_size=16, is_matryoshka=True)
CLASSIFIES = PoolingSpec(
    tasks=["classify", "token_classify"], embedding_size=16, num_labels=3, labels=["no", "maybe", "yes"]
)
SCORES = PoolingSpec(tasks=["score", "classify"], embedding_size=16, num_labels=1, labels=["fit"])
VOCAB_SIZE = 320
END_OF_TEXT = 0


@cache
def _config() -> EngineConfig:
    return resolve(model=demo_model_path())


def pooled(spec: PoolingSpec, token_ids: list[int], params: PoolingParams) -> NDArray[np.float32]:
    """A result that depends on all tokens: [Y], or [T, Y] of a task with a result for each token."""
    task = params.task or spec.tasks[0]
    is_embedding = task in ("embed", "token_embed")
    size = params.dimensions or (spec.embedding_size if is_embedding else spec.num_labels)
    prefixes = [token_ids[: end + 1] for end in range(len(token_ids))] if task.startswith("token_") else [token_ids]
    rows = np.array([np.random.default_rng(prefix).normal(size=max(size, 64))[:size] for prefix in prefixes])
    if params.use_activation is not False and is_embedding:
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    elif params.use_activation is not False:
        rows = 1 / (1 + np.exp(-rows)) if size == 1 else np.exp(rows) / np.exp(rows).sum(1, keepdims=True)
    rows = rows.astype(np.float32)
    return rows if task.startswith("token_") else rows[0]


class FakeEngine(AsyncCalls):
    """Stands in for `AsyncLLM`. Records what was asked for, and which requests were aborted."""

    def __init__(
        self,
        text: str = " 85 is the answer",
        max_model_len: int = 200,
        metrics: MetricsView | None = None,
        tokenizer: Tokenizer | None = None,
        pooling: PoolingSpec | None = None,
    ) -> None:
        """
        Args:
            text: follows every prompt. The end of sequence comes after it.
            metrics: what `read_metrics()` returns. None: an engine without ranks.
            tokenizer: the model's. None: the demo model's.
            pooling: what the model pools. None: it generates.
        """
        self.text = text
        self.token_ids: list[int] | None = None
        """Follow every prompt instead of `text`."""
        self.tokenizer = Tokenizer.from_dir(demo_model_path()) if tokenizer is None else tokenizer
        self.unavailable_reason: str | None = None
        self.images: PromptImages = OnlyText("fake")
        self.default_sampling_params: dict[str, Any] = {}
        self.max_model_len = max_model_len
        self.max_http_logprobs = 20
        self.pooling_spec = pooling
        self.named_prompts: dict[str, str] = {}
        self.prompts: list[Any] = []
        """The prompts to pool."""
        self.pooling_params: list[PoolingParams] = []
        self.before_result: Callable[[], Any] = lambda: None
        """Called before each result of pooling; may raise, or return an awaitable."""
        self.asked: list[list[int]] = []
        """The prompts to continue."""
        self.params: list[SamplingParams] = []
        self.beams: list[BeamSearchParams] = []
        self.request_ids: list[str] = []
        self.cache_salts: list[str | None] = []
        self.dp_ranks: list[int | None] = []
        self.loras: list[LoRARequest | None] = []
        """The adapter of each request."""
        self.lora_ids: set[int] = set()
        """What `list_loras()` returns."""
        self.num_underway = 0
        self.aborted: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        """The admin calls, each as its name and arguments."""
        self.at_token: Callable[[int], Any] = lambda index: None
        """Called before each token; may raise, or return an awaitable."""
        self.output_parts: list[OutputPart] = []
        """What adds to outputs."""
        self.queue_s = self.step_s = 0.0
        """How long a request waits for its first step, and how long each step takes. Nothing is waited for: these are
        the times in the outputs' `metrics` and `trace`."""
        self._metrics = make_view(0) if metrics is None else metrics
        self.traces: Traces = NO_TRACES
        self._is_tracing = False
        self._watchers = Watchers()
        self._seq_ids = itertools.count()
        self._vocab_size = VOCAB_SIZE if tokenizer is None else tokenizer.vocab_size
        self._limits = RequestLimits(self._vocab_size, max_model_len, block_size=16, num_blocks=1000)
        self.check_params: Callable[[SamplingParams], None] = params_check(make_config())

    @property
    def config(self) -> EngineConfig:
        return _config()

    async def abort_requests(self, request_ids: Sequence[str] | None) -> int:
        self.calls.append(("abort_requests", request_ids))
        return 0 if request_ids is None else len(request_ids)

    def read_metrics(self) -> MetricsView:
        return self._metrics

    def trace_requests(self) -> None:
        self._is_tracing = True

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    async def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(call).bind(self, *args, **kwargs)
        bound.apply_defaults()
        _, *arguments = bound.arguments.values()
        is_question = call.__name__.startswith(("is_", "list_"))
        answer = getattr(self, f"_{call.__name__}", lambda *_: None)(*arguments)
        if not is_question:
            self.calls.append((call.__name__, *arguments))
        return answer

    def _is_paused(self) -> bool:
        return self.calls[-1:] != [("resume_generation",)]

    def _sleep(self, level: int, mode: PauseMode) -> None:
        if level == 2:
            raise EngineDeadError("the engine was shut down")

    def _wake_up(self, tags: list[str] | None, reads_weights: bool) -> bool:
        if tags == ["all"]:
            raise InvalidInput("wake_up(): tags=['all'] isn't a list of 'weights'")
        return tags is None

    def _is_sleeping(self) -> bool:
        return self.calls[-1:] != [("wake_up", None, True)]

    def _reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        return reset_running_requests

    def _collective_rpc(self, *_: object) -> list[Any]:
        return []

    def _start_profile(self, profile_prefix: str | None, *_: object) -> None:
        checked_prefix(profile_prefix)

    def _add_lora(self, lora_request: LoRARequest) -> bool:
        if not Path(lora_request.lora_path).is_dir():
            raise InvalidAdapter(f"{lora_request.lora_path} isn't a directory")
        return True

    def _list_loras(self) -> set[int]:
        return set(self.lora_ids)

    def _remove_lora(self, lora_id: int) -> bool:
        return True

    def check(self, prompt: ParsedPrompt, params: SamplingParams | PoolingParams) -> None:
        if isinstance(params, PoolingParams):
            assert self.pooling_spec is not None
            self._limits.check(prompt.token_ids, PLACEHOLDER, resolved(params, None, self.pooling_spec))
        else:
            self._limits.check(prompt.token_ids, params, features=prompt.features)
            self.check_params(params)

    def watch(self, watcher: Watcher) -> None:
        self._watchers.add(watcher)

    async def ask(self, asks: Sequence[Ask]) -> AsyncGenerator[Any, None]:
        parsed = [replace(ask, prompt=parse_prompts([ask.prompt], self.tokenizer)[0]) for ask in asks]
        first = self._watchers.wanted(parsed[0])
        with self._watchers.watch([first, *parsed[1:]]) as watch:
            if isinstance(first.params, BeamSearchParams):
                outputs = self._best(first, first.params)
            elif isinstance(first.params, PoolingParams):
                self.prompts += [ask.prompt for ask in asks]
                outputs = self._pooled(parsed, first.params)
            else:
                outputs = self._generated(first, first.params)
            async with aclosing(outputs):
                async for output in outputs:
                    watch.note(output)
                    yield output

    async def _best(self, ask: Ask, params: BeamSearchParams) -> AsyncGenerator[RequestOutput, None]:
        """The engine's text, as often as there are beams, each with another log probability."""
        self.beams.append(params)
        self.cache_salts.append(ask.parsed.cache_salt)
        ids = self.tokenizer.encode(self.text)[: params.max_tokens]
        outputs: list[CompletionOutput] = []
        for index in range(params.beam_width):
            logprobs: list[Any] = [{token_id: Logprob(-1.0 - index, index + 1)} for token_id in ids]
            text = self.tokenizer.decode(ids)
            outputs.append(
                CompletionOutput(index, text, ids, -float(index), logprobs, finish_reason="stop", stop_reason=2)
            )
        yield RequestOutput(ask.request_id, None, ask.parsed.token_ids, outputs=outputs, finished=True)

    async def _pooled(self, asks: Sequence[Ask], given: PoolingParams) -> AsyncGenerator[Any, None]:
        assert self.pooling_spec is not None
        params = resolved(given, None, self.pooling_spec)
        self._note(asks)
        self.pooling_params += [params] * len(asks)
        self.num_underway += 1
        results: list[PoolingRequestOutput[PoolingOutput]] = []
        try:
            for ask in asks:
                pause = self.before_result()
                await (pause if pause is not None else asyncio.sleep(0))
                ids = ask.parsed.token_ids
                data = PoolingOutput(pooled(self.pooling_spec, ids, params))
                results.append(PoolingRequestOutput(ask.request_id, data, ids, num_cached_tokens=0))
        finally:
            self.num_underway -= 1
            if len(results) < len(asks):
                self.aborted += [ask.request_id for ask in asks]
        for result in results:
            yield result

    def _note(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            if ask.data_parallel_rank not in (None, 0, 1):
                raise InvalidRequest(f"data_parallel_rank={ask.data_parallel_rank} isn't 0 or 1")
            self.request_ids.append(ask.request_id)
            self.cache_salts.append(ask.parsed.cache_salt)
            self.dp_ranks.append(ask.data_parallel_rank)
            self.loras.append(ask.lora)

    async def _generated(self, ask: Ask, params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        self._note([ask])
        prompt, request_id = ask.parsed.token_ids, ask.request_id
        self.asked.append(prompt)
        self.params.append(params)
        seq_ids = [next(self._seq_ids) for _ in range(params.n)]
        arrival_s = time.monotonic()
        steps_end_s = itertools.count(arrival_s + self.queue_s + self.step_s, self.step_s)
        clock = itertools.chain([arrival_s], steps_end_s).__next__
        assembler = OutputProcessor(self.tokenizer, clock, self.output_parts)
        assembler.is_tracing = self._is_tracing
        assembler.add(checked(request_id, prompt, params, stream=ask.stream), seq_ids)
        self.num_underway += 1
        is_finished = False
        try:
            for index, batch in enumerate(self._batches(prompt, params, seq_ids)):
                pause = self.at_token(index)
                await (pause if pause is not None else asyncio.sleep(0))
                for update in assembler.process(batch).updates:
                    if update.error is not None:
                        raise update.error
                    assert update.output is not None
                    is_finished = update.output.finished
                    if update.output.trace is not None:
                        update.output.trace.dp_rank = ask.data_parallel_rank or 0
                    yield update.output
                if is_finished:
                    return
        finally:
            self.num_underway -= 1
            if not is_finished:
                self.aborted.append(request_id)

    def _batches(self, prompt: list[int], params: SamplingParams, seq_ids: list[int]):
        """One for each step; the sequences of a request with `n` end one step after the other."""
        text_ids = self.token_ids
        if text_ids is None:
            text_ids = self.tokenizer.encode(self.text, add_special_tokens=False)
        most = min(params.max_tokens or self.max_model_len, self.max_model_len - len(prompt))
        length = most if params.ignore_eos else min(most, len(text_ids) + 1)
        for index in range(length + len(seq_ids)):
            tokens: list[tuple[int, int]] = []
            ends: list[FinishedRequest] = []
            for number, seq_id in enumerate(seq_ids):
                position = index - number
                if not 0 <= position < length:
                    continue
                token_id = text_ids[position] if position < len(text_ids) else END_OF_TEXT
                tokens.append((seq_id, token_id))
                if token_id == END_OF_TEXT and not params.ignore_eos:
                    ends.append(FinishedRequest(seq_id, "stop"))
                elif position == most - 1:
                    ends.append(FinishedRequest(seq_id, "length"))
            if tokens:
                yield self._batch(prompt if index == 0 else [], params, tokens, ends, seq_ids[0])

    def _batch(
        self,
        prompt: list[int],
        params: SamplingParams,
        tokens: list[tuple[int, int]],
        ends: list[FinishedRequest],
        first: int,
    ) -> OutputBatch:
        batch = OutputBatch(
            seq_ids=np.array([seq_id for seq_id, _ in tokens], np.int64).tobytes(),
            token_ids=np.array([token_id for _, token_id in tokens], np.int32).tobytes(),
            finished=ends,
            steps=[(len(tokens), 0.0, self.step_s)],
        )
        if params.logprobs is not None:
            batch.logprobs = [(seq_id, self._logprobs(token_id, params.logprobs)) for seq_id, token_id in tokens]
        if (chosen := params.logprob_token_ids) is not None:
            batch.logprobs = [
                (seq_id, TokenLogprobs([token_id, *chosen], [-0.5, *(-1.0 - each for each in chosen)], 1))
                for seq_id, token_id in tokens
            ]
        if params.prompt_logprobs is not None and len(prompt) > 1:
            entries = [self._logprobs(token_id, params.prompt_logprobs) for token_id in prompt[1:]]
            batch.prompt_logprobs = [(first, 1, entries)]
        if prompt:
            batch.started = [(first, 0)]
            batch.queued = [(first, self.queue_s)]
        return batch

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        """The token is the most likely one; the next ids follow it, the last of them at minus infinity."""
        num_top = self._vocab_size if num_top == -1 else num_top
        others = [(token_id + i) % self._vocab_size for i in range(num_top)]
        logprobs = [-0.5 - i for i in range(num_top)]
        if num_top > 1:
            logprobs[-1] = float("-inf")
        return TokenLogprobs([token_id, *others], [-0.5, *logprobs], 1)
