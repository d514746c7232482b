"""Runs a chat on the engine, and reads what the model writes: the core of every API whose answers are messages.

An API turns its request into a `ChatCompletionRequest`, prepares a `MessageRun`, and renders in its own
format the `MessageDelta`s that the run yields.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from raycore.outputs import CompletionOutput, RequestOutput
from raycore.parts.images.server import with_images
from raycore.server.chat.choice_reader import ChoiceReader
from raycore.server.chat.parts import MessageDelta, Totals
from raycore.server.chat.plan import MessagePlan
from raycore.server.chat.prompt import as_dicts, encode, render, shown_tools, template_kwargs
from raycore.server.contract.engine import ServingEngine
from raycore.server.contract.models import RequestModel
from raycore.server.contract.service import Context
from raycore.server.generation.jobs import Job, Progress, run, run_streaming
from raycore.server.generation.logprobs import TokenNames
from raycore.server.generation.sampling import chat_params
from raycore.server.protocol import ChatCompletionRequest
from raycore.text.media_parts import take_images


@dataclass(frozen=True)
class MessageRun:
    """A checked chat request. `whole()` runs it at once, and `stream()` yields its outputs as they arrive."""

    engine: ServingEngine
    request: ChatCompletionRequest
    job: Job
    plan: MessagePlan
    names: TokenNames
    prompt_text: str
    """The prompt, before it was cut and tokenized."""

    @staticmethod
    def prepare(context: Context, request: ChatCompletionRequest, model: RequestModel, request_id: str) -> MessageRun:
        """Check a request and prepare its prompt. Raises APIError if the request can't be run."""
        engine, options, tokenizer = context.engine, context.options, context.engine.get_tokenizer()
        asked = chat_params(request, engine.default_sampling_params, options)
        variables = options.default_chat_template_kwargs | template_kwargs(request)
        messages, images = take_images(as_dicts(request.messages))
        if images and engine.images.placeholder is None:
            with_images(engine.images, "", images, {}, adds_special_tokens=False)  # raises
        conversation = render(
            tokenizer,
            options,
            messages,
            shown_tools(request, options),
            request.chat_template,
            variables,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            images=engine.images,
        )
        plan = MessagePlan.of(request, conversation, variables, asked.structured_outputs, tokenizer, options)
        params = plan.params(asked, tokenizer)
        text = plan.prompt(conversation)
        prompt = encode(engine, request, text, images, options)
        engine.check(prompt, params)
        job = Job.of(context, request, prompt, params, request_id, model.lora, plan.constraint_param)
        return MessageRun(engine, request, job, plan, TokenNames.of(request, tokenizer, options), text)

    @property
    def num_choices(self) -> int:
        return self.job.params.n

    async def whole(self) -> list[MessageDelta]:
        """Run the request. Returns the whole of each choice, in the order of their numbers.

        Cancelling the call aborts the request.

        Raises:
            APIError: the model did not make a required tool call.
            RaycoreError: the engine couldn't run the request.
        """
        (output,) = await run(self.engine, [self.job])
        return self.read(output)

    def read(self, output: RequestOutput) -> list[MessageDelta]:
        """The whole of each choice of a complete output. Raises APIError as `whole()` does."""
        return list(self.reader().read(output))

    def stream(self) -> AsyncGenerator[RequestOutput, None]:
        """Run the request. Yields its output so far, as it arrives. Closing the iterator aborts the request.

        Raises:
            RaycoreError: the engine couldn't run the request.
        """
        return run_streaming(self.engine, [self.job])

    def reader(self) -> DeltaReader:
        """What reads the outputs of `stream()`."""
        return DeltaReader(self)

    def counter(self) -> TotalsCounter:
        """A new counter of the request's tokens."""
        return TotalsCounter(self)


class TotalsCounter:
    """Counts the tokens of one request."""

    def __init__(self, message: MessageRun) -> None:
        reasoning, tokenizer = message.plan.reasoning, message.engine.get_tokenizer()
        num_choices = 0 if reasoning is None else message.num_choices
        self._counters = [reasoning.counter(tokenizer) for _ in range(num_choices)] if reasoning is not None else None

    def totals(self, output: RequestOutput) -> Totals:
        """The numbers of a request's tokens so far. Give outputs in the order in which they arrived."""
        reasoning = None
        if self._counters is not None:
            reasoning = sum(self._counters[each.index].count(each) for each in output.outputs)
        num_output = sum(len(each.token_ids) for each in output.outputs)
        return Totals(len(output.prompt_token_ids), output.num_cached_tokens or 0, num_output, reasoning)


class DeltaReader:
    """Reads the outputs of one request, in the order in which they arrive. Each has the whole output so far.

    It isn't an iterator between the engine's and the API's: with every token, another one costs as much as the reading.
    """

    def __init__(self, message: MessageRun) -> None:
        self._choices = [(Progress(), message.plan.reader()) for _ in range(message.num_choices)]

    def read(self, output: RequestOutput) -> Iterator[MessageDelta]:
        """Yield what is new of each choice.

        Raises:
            APIError: the model did not make a required tool call.
        """
        for each in output.outputs:
            yield delta_of(output, each, *self._choices[each.index])


def delta_of(
    output: RequestOutput, completion: CompletionOutput, progress: Progress, reader: ChoiceReader
) -> MessageDelta:
    """What is new in `completion`, one of the choices of `output`."""
    new = progress.advance(completion)
    parts = reader.read(new.text, new.finish_reason, new.stop_reason)
    finish_reason = reader.finish_reason(new.finish_reason)
    return MessageDelta(
        completion.index, parts, new.token_ids, new.logprobs, finish_reason, new.stop_reason, completion, output
    )
