"""Answers `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from raycore.client.inputs import Images
from raycore.messages import Feature, FeatureData
from raycore.outputs import PositionLogprobs, RequestOutput
from raycore.server.chat.choice_reader import ChoiceReader
from raycore.server.chat.images import with_images
from raycore.server.chat.plan import MessagePlan
from raycore.server.chat.reasoning import ReasoningCounter
from raycore.server.envelope import Envelope
from raycore.server.errors import APIError
from raycore.server.generation import Job, New, Progress, ServingEngine, run, run_streaming, usage
from raycore.server.limits import check_length, check_text
from raycore.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from raycore.server.models import Model
from raycore.server.options import RESERVED_TEMPLATE_VARIABLES, ServerOptions
from raycore.server.protocol import ChatCompletionRequest, Message, Tool
from raycore.server.sampling import asked_length, chat_params
from raycore.text.conversation import content_text
from raycore.text.media_parts import ImagePlace, MediaPart, take_images
from raycore.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Chat:
    """A checked chat request. `answer()` runs it and returns the whole response; `events()` streams the response."""

    engine: ServingEngine
    request: ChatCompletionRequest
    envelope: Envelope
    job: Job
    plan: MessagePlan
    names: TokenNames
    role: str
    """The role of the response's messages."""

    @staticmethod
    def prepare(
        engine: ServingEngine, request: ChatCompletionRequest, options: ServerOptions, model: Model, request_id: str
    ) -> Chat:
        """Check a request and prepare its prompt. Raises APIError if the request can't be run."""
        tokenizer = engine.get_tokenizer()
        asked = chat_params(request, engine.default_sampling_params, options)
        template_kwargs = options.default_chat_template_kwargs | _template_kwargs(request)
        messages, images = take_images(as_dicts(request.messages))
        if images and engine.images.placeholder is None:
            with_images(engine.images, "", images, {}, adds_special_tokens=False)  # raises
        conversation = render(
            tokenizer,
            options,
            messages,
            None if request.tool_choice == "none" and options.exclude_tools_when_tool_choice_none else request.tools,
            request.chat_template,
            template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            images=engine.images,
        )
        plan = MessagePlan.of(request, conversation, template_kwargs, asked.structured_outputs, tokenizer, options)
        params = plan.params(asked, tokenizer)
        token_ids, features, data = _encode(engine, request, plan.prompt(conversation), images)
        engine.check(token_ids, params, features)
        job = Job.of(request, token_ids, params, request_id, plan.constraint_param, model.lora)
        if features:
            job = replace(job, features=features, feature_data=data)
        names = TokenNames.of(request, tokenizer, options)
        envelope = Envelope.of(request, model.name, request_id, options)
        role = request.messages[-1].role if request.continue_final_message else options.response_role
        return Chat(engine, request, envelope, job, plan, names, role)

    async def answer(self) -> dict[str, Any]:
        """Run the request, and return the body of the complete response."""
        (output,) = await run(self.engine, [self.job])
        choices: list[dict[str, Any]] = []
        for completion in output.outputs:
            reader = self.plan.reader()
            message: dict[str, Any] = {"role": self.role, "content": None, "refusal": None}
            message |= reader.message(completion.text, completion.finish_reason, completion.stop_reason)
            if self._echoed():
                message["content"] = self._echoed() + (message["content"] or "")
            choice: dict[str, Any] = {
                "index": completion.index,
                "message": message,
                "logprobs": self._logprobs(completion.token_ids, completion.logprobs),
                "finish_reason": reader.finish_reason(completion.finish_reason),
                "stop_reason": completion.stop_reason,
            }
            if self.request.return_token_ids:
                choice["token_ids"] = completion.token_ids
            choices.append(choice)
        envelope = self.envelope.around("chat.completion", choices, self._usage(output, self._counters()))
        if self.request.return_token_ids:
            envelope["prompt_token_ids"] = output.prompt_token_ids
        if self.request.prompt_logprobs is not None:
            envelope["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        return envelope

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Run the request, and yield the events of the streamed response.

        For each choice these are the role, then the text as it arrives, then the finish reason.
        """
        progress = [Progress() for _ in range(self.job.params.n)]
        readers = [self.plan.reader() for _ in progress]
        counters = self._counters()
        output: RequestOutput | None = None
        begun = self._echoed() or ("" if self.plan.tools is None else None)
        roles = [self._delta(i, {"role": self.role, "content": begun}) for i in range(len(progress))]
        async with aclosing(run_streaming(self.engine, [self.job])) as outputs:
            async for _, output in outputs:
                counts_always = self.envelope.has_usage_in_each
                used = self._usage(output, counters) if counts_always else None
                for role in roles:
                    before = self._usage(replace(output, outputs=[]), counters) if counts_always else None
                    first = self.envelope.around("chat.completion.chunk", [role], before)
                    if self.request.return_token_ids:
                        first["prompt_token_ids"] = output.prompt_token_ids
                    yield first
                roles = []
                for completion in output.outputs:
                    new = progress[completion.index].advance(completion)
                    for choice in self._choices(completion.index, new, readers[completion.index]):
                        yield self.envelope.around("chat.completion.chunk", [choice], used)
        if output is not None and self.envelope.has_usage:
            yield self.envelope.around("chat.completion.chunk", [], self._usage(output, counters))

    def _echoed(self) -> str:
        """With `echo`, the text of the request's last message, with which the response begins. Otherwise empty."""
        last = self.request.messages[-1]
        if not self.request.echo:
            return ""
        (kept,), images = take_images(as_dicts([last]))
        content = [part for part in kept["content"] if not isinstance(part, ImagePlace)] if images else last.content
        return content_text(last.role, content)

    def _choices(self, index: int, new: New, reader: ChoiceReader) -> list[dict[str, Any]]:
        """The new part of a sequence as choices of the stream. Each choice is sent in an event of its own."""
        deltas = reader.read(new.text, new.finish_reason, new.stop_reason)
        reason = reader.finish_reason(new.finish_reason)
        if not deltas and (reason or new.logprobs or (new.token_ids and self.request.return_token_ids)):
            deltas.append({})
        choices = [self._delta(index, delta) for delta in deltas]
        if choices:
            choices[0]["logprobs"] = self._logprobs(new.token_ids, new.logprobs)
            if self.request.return_token_ids:
                choices[0]["token_ids"] = new.token_ids
            choices[-1]["finish_reason"] = reason
            if new.stop_reason is not None:
                choices[-1]["stop_reason"] = new.stop_reason
        return choices

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, token_ids: list[int], positions: list[PositionLogprobs] | None) -> dict[str, Any] | None:
        if positions is None:
            return None
        return chat_logprobs(self.names, token_ids, positions, self.request.top_logprobs or 0)

    def _counters(self) -> list[ReasoningCounter] | None:
        reasoning = self.plan.reasoning
        if reasoning is None:
            return None
        return [reasoning.counter(self.engine.get_tokenizer()) for _ in range(self.job.params.n)]

    def _usage(self, output: RequestOutput, counters: list[ReasoningCounter] | None) -> dict[str, Any]:
        used = usage([output])
        if counters is not None:
            num_tokens = sum(counters[completion.index].count(completion) for completion in output.outputs)
            used["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return used


def _template_kwargs(request: ChatCompletionRequest) -> dict[str, Any]:
    """The request's variables for the chat template. `reasoning_effort` sets those that templates read for it."""
    effort = request.reasoning_effort
    derived = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return derived | (request.chat_template_kwargs or {})


def _encode(
    engine: ServingEngine, request: ChatCompletionRequest, prompt: str, images: Sequence[MediaPart]
) -> tuple[list[int], Sequence[Feature], Sequence[FeatureData]]:
    """Tokenize the prompt, with its images.

    Raises:
        APIError: it is too long.
        InvalidRequest: an image is unusable.
    """
    check_text(engine, prompt, "messages")
    features: Sequence[Feature] = ()
    data: Sequence[FeatureData] = ()
    adds_special_tokens = bool(request.add_special_tokens)
    if images:
        names = ("mm_processor_kwargs", "media_io_kwargs", "cache_salt")
        fields = {name: getattr(request, name) for name in names}
        token_ids, features, data = with_images(
            engine.images, prompt, images, fields, adds_special_tokens=adds_special_tokens
        )
    else:
        token_ids = engine.get_tokenizer().encode(prompt, adds_special_tokens)
    name, max_tokens = asked_length(request)
    check_length(engine, token_ids, max_tokens, name, "messages")
    return token_ids, features, data


def as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates get them."""
    return [message.model_dump(exclude_unset=True) for message in messages]


def render(
    tokenizer: Tokenizer,
    options: ServerOptions,
    messages: Sequence[Any],
    tools: list[Tool] | None,
    chat_template: str | None,
    chat_template_kwargs: dict[str, Any],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    images: Images | None = None,
) -> str:
    """Render a conversation as text, with the request's chat template, else the server's, else the checkpoint's.

    Raises:
        APIError: the request has a template of its own, which the server doesn't allow; or `chat_template_kwargs` sets
            a variable that the server sets; or the text can't be encoded as UTF-8.
        InvalidRequest: the messages are invalid, or the template refuses them.
    """
    if chat_template is not None and not options.trust_request_chat_template:
        raise APIError(
            400,
            "chat_template: this server doesn't allow a request's own; start it with --trust-request-chat-template",
            param="chat_template",
        )
    taken = sorted(RESERVED_TEMPLATE_VARIABLES & chat_template_kwargs.keys())
    if taken:
        raise APIError(
            400, f"chat_template_kwargs has {taken[0]!r}, which is set by the server", param="chat_template_kwargs"
        )
    text = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
        chat_template=chat_template or options.chat_template,
        tools=[tool.model_dump(exclude_unset=True) for tool in tools] if tools else None,
        image_placeholder=None if images is None else images.placeholder,
        interleaves_images=images is not None and images.interleaves,
        **options.default_chat_template_kwargs | chat_template_kwargs,
    )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!a} is half of a surrogate pair, not a character"
        raise APIError(400, f"messages: {half}", param="messages") from None
    return text
