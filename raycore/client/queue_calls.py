"""The calls of `LLM` that queue requests, and wait for them later."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

# imported before any module that imports Ray, because this import silences Ray's message about missing widgets
from raycore.display.progress_bars import request_bar

# isort: split

from raycore.client.ask import Ask, asks_of
from raycore.client.client import EngineClient
from raycore.client.inputs import ParsedPrompt, Prompt
from raycore.client.rendering import Adapters, Messages, chat_prompts, completion_prompts
from raycore.client.step_queue import Output, StepQueue
from raycore.errors import InvalidRequest, RequestFailed
from raycore.json_fields import shortened
from raycore.outputs import PoolingRequestOutput, RequestOutput
from raycore.sampling_params import SamplingParams
from raycore.short_tracebacks import ends_tracebacks

_Params = SamplingParams | Sequence[SamplingParams] | None


@ends_tracebacks
class QueueCalls:
    """What `LLM` has for requests that are queued."""

    _client: EngineClient

    @cached_property
    def _queue(self) -> StepQueue:
        """The queued requests, and those that were added by `llm_engine`."""
        return StepQueue(self._client)

    @abstractmethod
    def get_default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The sampling parameters of requests without any."""

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: _Params = None,
        lora_request: Adapters = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Begin to continue prompts, without waiting. `wait_for_completion()` returns the outputs.

        The arguments and errors are those of `generate()`. `use_tqdm` has no effect.

        Returns: the ids of the requests, in order.
        """
        parsed = completion_prompts(self._client, prompts, tokenization_kwargs, mm_processor_kwargs)
        return self._enqueue(self._asks(parsed, sampling_params, lora_request, priority))

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: _Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Begin to answer conversations, without waiting. `wait_for_completion()` returns the outputs.

        The arguments and errors are those of `chat()`. `use_tqdm` has no effect.

        Returns: the ids of the requests, in order.
        """
        parsed = chat_prompts(
            self._client,
            messages,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._enqueue(self._asks(parsed, sampling_params, lora_request, priority))

    def wait_for_completion(
        self,
        output_type: type[Any] | tuple[type[Any], ...] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[Any]:
        """Wait until all queued requests have ended. `generate()` neither waits for them nor returns them.

        Args:
            output_type: the expected types of outputs. None: `RequestOutput` and `PoolingRequestOutput`.
            use_tqdm: show a progress bar.

        Returns: the outputs of the requests, in the order in which these were queued.

        Raises:
            InvalidRequest: the engine's outputs have another type. No request is lost.
            RequestFailed: a request failed, but the engine didn't. The exception has the outputs of the other requests
                in `outputs`.
            EngineDeadError: the engine has failed or was shut down; the message begins with the cause.
        """
        own = RequestOutput if self._client.checks.pooling is None else PoolingRequestOutput
        if output_type is not None and not issubclass(own, output_type):
            raise InvalidRequest(f"output_type={shortened(output_type)}, but this engine's outputs are {own.__name__}")
        request_ids = self._queue.request_ids
        finished: dict[str, Output] = {}
        failure: RequestFailed | None = None
        with request_bar(len(request_ids), use_tqdm) as bar:
            while self._queue.num_unfinished:
                try:
                    outputs = self._queue.step()
                except (RequestFailed, InvalidRequest) as error:
                    failure = failure or (error if isinstance(error, RequestFailed) else RequestFailed(str(error)))
                    outputs = []
                finished |= {output.request_id: output for output in outputs if output.finished}
                bar.n = len(finished)
                bar.refresh()
        if failure is not None:
            failure.outputs = [finished.get(each) for each in request_ids]  # pyright: ignore[reportAttributeAccessIssue]
            raise failure
        return [finished[each] for each in request_ids if each in finished]

    def _asks(
        self, prompts: Sequence[ParsedPrompt], sampling_params: _Params, lora_request: Adapters, priority: Any
    ) -> list[Ask]:
        """The requests of a call, which asks the same of all its prompts, or of each something else."""
        return asks_of(prompts, sampling_params or self.get_default_sampling_params(), lora_request, priority)

    def _enqueue(self, asks: list[Ask]) -> list[str]:
        if asks:
            self._queue.add(asks)
        return [ask.request_id for ask in asks]
