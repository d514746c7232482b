"""`LLMEngine`: an engine whose caller adds requests and fetches their outputs step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from raycore.client.ask import Ask
from raycore.client.inputs import Prompt, adapters_for_each, checked_request_id
from raycore.client.rendering import completion_prompts
from raycore.client.step_queue import Output, StepQueue
from raycore.config import EngineConfig
from raycore.control.calls import EngineCalls
from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.lora.request import LoRARequest
from raycore.metrics.snapshot import Metric
from raycore.node.own_process import OwnProcess
from raycore.parts.pooling.client.pooling import supported_tasks
from raycore.pooling_params import PoolingParams
from raycore.running_engine import RunningEngine
from raycore.sampling_params import RequestOutputKind, SamplingParams
from raycore.short_tracebacks import ends_traceback
from raycore.text.hf_tokenizer import HfTokenizer

if TYPE_CHECKING:
    from raycore.engine_args import EngineArgs


class LLMEngine(OwnProcess, EngineCalls):
    """An engine whose caller adds requests and fetches their outputs step by step.

    ::

        engine = LLMEngine.from_engine_args(EngineArgs("path/to/checkpoint"))
        engine.add_request("1", "Hello, my name is", SamplingParams(max_tokens=32))
        while engine.has_unfinished_requests():
            for output in engine.step():
                print(output.outputs[0].text)

    The engine computes whether or not steps are taken: a step only fetches what has come. The engine ends when nothing
    refers to this object any more, or with `shutdown()`. All methods are thread-safe.
    """

    def __init__(self, engine: RunningEngine, queue: StepQueue | None = None) -> None:
        """Use a running engine. `queue`: its requests, where others use them, too."""
        parts = engine._parts  # pyright: ignore[reportPrivateUsage]  # both are the engine's interface
        super().__init__(parts)
        self._engine = engine
        self._client = parts.client
        self._queue = StepQueue(parts.client) if queue is None else queue

    @classmethod
    @ends_traceback
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: object = None,
        stat_loggers: Sequence[object] | None = None,
        enable_multiprocessing: bool = False,
    ) -> LLMEngine:
        """Start an engine with these arguments. `usage_context` and `enable_multiprocessing` have no effect.

        The errors are those of `LLM`.
        """
        return cls(RunningEngine.from_engine_args(engine_args, stat_loggers=stat_loggers))

    @ends_traceback
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Add a request. `step()` returns its outputs.

        Args:
            request_id: must not be the id of another unfinished request.
            prompt: one prompt, as in `LLM.generate()`.
            params: of the kind that fits the model. With `RequestOutputKind.FINAL_ONLY`, there is one output.
            arrival_time: no effect: the request arrives now.
            lora_request: the adapter that the request uses. Needs `enable_lora`.
            tokenization_kwargs: as in `LLM.generate()`.
            trace_headers: as in `AsyncLLM.generate()`.
            priority: lower values run first. Needs `scheduling_policy="priority"`.

        Returns: the request's id.

        Raises:
            InvalidRequest: an argument is unusable; the message names it.
            EngineDeadError: the engine has failed, was shut down or is draining; the message begins with the cause.
        """
        own_id = checked_request_id(request_id)
        given: Any = params  # users may pass anything
        (parsed,) = completion_prompts(self._client, [prompt], tokenization_kwargs)
        (adapter,) = adapters_for_each(lora_request, 1)
        if not isinstance(given, SamplingParams | PoolingParams):
            raise InvalidRequest(f"params={shortened(given)} is neither SamplingParams nor PoolingParams")
        is_streamed = isinstance(given, SamplingParams) and given.output_kind is not RequestOutputKind.FINAL_ONLY
        headers = trace_headers or {}
        self._queue.add([Ask(parsed, given, own_id, priority, is_streamed, lora=adapter, trace_headers=headers)])
        return own_id

    def step(self) -> list[Output]:
        """Return the outputs that have come since the previous step, at most one for each request.

        If there are none, but requests are unfinished, wait for one, up to a second. With
        `RequestOutputKind.DELTA`, nothing is lost, however rarely steps are taken.

        Raises:
            RequestFailed, InvalidRequest: a request has failed. The outputs of the others come in the next steps.
            EngineDeadError: the engine has failed, and with it all requests.
        """
        return self._queue.step()

    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests, from which no more outputs come. Ignores unknown ids. `internal` has no effect."""
        given: Any = request_ids
        self._queue.abort([given] if isinstance(given, str) else list(cast("Iterable[str]", given)))

    def get_num_unfinished_requests(self) -> int:
        """Number of requests whose last output hasn't been fetched."""
        return self._queue.num_unfinished

    def has_unfinished_requests(self) -> bool:
        """Whether there are requests whose last output hasn't been fetched."""
        return self._queue.num_unfinished > 0

    def get_supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the engine can be asked for, the default first: `generate`, or those of a model that pools."""
        return supported_tasks(self._client.checks.pooling)

    def get_tokenizer(self) -> HfTokenizer:
        """The engine's tokenizer, with Hugging Face's calls."""
        return HfTokenizer.of(self._client.tokenizer)

    @property
    def engine_core(self) -> LLMEngine:
        """This object: the calls that vLLM's has there, such as `save_sharded_state()`, are its own."""
        return self

    @property
    def tokenizer(self) -> HfTokenizer:
        """The same as `get_tokenizer()`."""
        return self.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics: see `LLM.get_metrics()`."""
        return self._engine.get_metrics()

    @property
    def vllm_config(self) -> EngineConfig:
        """The engine's configuration, whose parts have vLLM's names, too."""
        return self._engine.config

    @property
    def model_config(self) -> Any:
        """The configuration of the model."""
        return self._engine.config.model

    def do_log_stats(self) -> None:
        """Log the numbers of requests and tokens, at level INFO."""
        self._engine.do_log_stats()

    def shutdown(self, drain_timeout_s: float = 0.0) -> None:
        """Stop the engine: see `LLM.shutdown()`."""
        self._engine.shutdown(drain_timeout_s)
