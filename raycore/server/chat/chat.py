"""Answers `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from raycore.outputs import RequestOutput, SampleLogprobs
from raycore.parts.routed_experts.server import experts_field
from raycore.parts.transfers.server import told
from raycore.server.chat.message import MessageRun, TotalsCounter
from raycore.server.chat.parts import CallBegin, MessageDelta, Part, ReasoningText
from raycore.server.chat.prompt import as_dicts
from raycore.server.contract.models import RequestModel
from raycore.server.contract.service import Context
from raycore.server.generation.envelope import Envelope
from raycore.server.generation.jobs import usage
from raycore.server.generation.logprobs import chat_logprobs, num_shown, prompt_logprobs
from raycore.server.parsers.tool_calls import Content
from raycore.server.protocol import ChatCompletionRequest
from raycore.text.conversation import content_text
from raycore.text.media_parts import ImagePlace, take_images


@dataclass(frozen=True)
class Chat:
    """A checked chat request. `answer()` runs it and returns the whole response; `events()` streams the response."""

    request: ChatCompletionRequest
    envelope: Envelope
    message: MessageRun
    role: str
    """The role of the response's messages."""

    @staticmethod
    def prepare(context: Context, request: ChatCompletionRequest, model: RequestModel, request_id: str) -> Chat:
        """Check a request and prepare its prompt. Raises APIError if the request can't be run."""
        message = MessageRun.prepare(context, request, model, request_id)
        envelope = Envelope.of(request, model.name, request_id, context.options)
        role = request.messages[-1].role if request.continue_final_message else context.options.response_role
        return Chat(request, envelope, message, role)

    async def answer(self) -> dict[str, Any]:
        """Run the request, and return the body of the complete response."""
        return self.body(await self.message.whole())

    def body(self, choices: Sequence[MessageDelta]) -> dict[str, Any]:
        """The body of the complete response. `choices`: the whole of each."""
        output = choices[0].output
        used = _usage(output, self.message.counter())
        envelope = self.envelope.around("chat.completion", [self._whole(each) for each in choices], used)
        if self.request.return_token_ids:
            envelope["prompt_token_ids"] = output.prompt_token_ids
        if self.request.return_prompt_text:
            envelope["prompt_text"] = self.message.prompt_text
        if self.request.prompt_logprobs is not None:
            envelope["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        return envelope | told(output)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Run the request, and yield the events of the streamed response.

        For each choice these are the role, then the text as it arrives, then the finish reason.
        """
        counter = self.message.counter()
        output: RequestOutput | None = None
        counts_always = self.envelope.has_usage_in_each
        begun = self._echoed() or ("" if self.message.plan.tools is None else None)
        roles = [_delta(i, {"role": self.role, "content": begun}) for i in range(self.message.num_choices)]
        reader = self.message.reader()
        async with aclosing(self.message.stream()) as outputs:
            async for output in outputs:
                for delta in reader.read(output):
                    for role in roles:
                        before = _usage(replace(output, outputs=[]), counter) if counts_always else None
                        first = self.envelope.around("chat.completion.chunk", [role], before)
                        if self.request.return_token_ids:
                            first["prompt_token_ids"] = output.prompt_token_ids
                        if self.request.return_prompt_text:
                            first["prompt_text"] = self.message.prompt_text
                        yield first
                    roles = []
                    used = _usage(output, counter) if counts_always else None
                    for choice in self.choices(delta):
                        yield self.envelope.around("chat.completion.chunk", [choice], used)
        if output is not None and self.envelope.has_usage:
            yield self.envelope.around("chat.completion.chunk", [], _usage(output, counter))

    @property
    def _includes_reasoning(self) -> bool:
        return self.message.plan.reasoning is not None and self.request.include_reasoning

    def _echoed(self) -> str:
        """With `echo`, the text of the request's last message, with which the response begins. Otherwise empty."""
        last = self.request.messages[-1]
        if not self.request.echo:
            return ""
        (kept,), images = take_images(as_dicts([last]))
        content = [part for part in kept["content"] if not isinstance(part, ImagePlace)] if images else last.content
        return content_text(last.role, content)

    def _whole(self, delta: MessageDelta) -> dict[str, Any]:
        """A whole choice of the complete response."""
        choice: dict[str, Any] = {
            "index": delta.index,
            "message": {"role": self.role, "content": None, "refusal": None} | self._message(delta.parts),
            "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **experts_field(delta.completion.routed_experts),
            **told(delta.completion),
        }
        if self.request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _message(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The fields of a message that depend on what the model wrote."""
        reasoning, content, calls = _joined(parts)
        tools = self.message.plan.tools
        is_other = bool(reasoning or calls) or (tools is not None and tools.must_call)
        message: dict[str, Any] = {"content": self._echoed() + content or (None if is_other else "")}
        if calls:
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        return {"reasoning": reasoning or None, **message} if self._includes_reasoning else message

    def choices(self, delta: MessageDelta) -> list[dict[str, Any]]:
        """What is new of a choice, as choices of the stream. Each is sent in an event of its own."""
        messages = self._deltas(delta.parts)
        has_tokens = bool(delta.token_ids) and self.request.return_token_ids
        if not messages and (delta.finish_reason or delta.logprobs or has_tokens):
            messages.append({})
        choices = [_delta(delta.index, message) for message in messages]
        if choices:
            choices[0]["logprobs"] = self._logprobs(delta.token_ids, delta.logprobs)
            if self.request.return_token_ids:
                choices[0]["token_ids"] = delta.token_ids
            choices[-1]["finish_reason"] = delta.finish_reason
            if delta.stop_reason is not None:
                choices[-1]["stop_reason"] = delta.stop_reason
            choices[-1] |= experts_field(delta.completion.routed_experts) | told(delta.completion)
        return choices

    def _deltas(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        reasoning, content, calls = _joined(parts)
        deltas: list[dict[str, Any]] = [{"reasoning": reasoning}] if reasoning and self._includes_reasoning else []
        deltas += [{"content": content}] if content else []
        return [*deltas, {"tool_calls": calls}] if calls else deltas

    def _logprobs(self, token_ids: list[int], positions: SampleLogprobs | None) -> dict[str, Any] | None:
        if positions is None:
            return None
        return chat_logprobs(
            self.message.names, token_ids, positions, num_shown(self.request, self.request.top_logprobs or 0)
        )


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _joined(parts: Sequence[Part]) -> tuple[str, str, list[dict[str, Any]]]:
    """The reasoning, the content, and the calls as the deltas of a stream have them."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallBegin):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"index": part.index, "id": part.id, "type": "function", "function": function}
        elif not isinstance(part, (ReasoningText, Content)):
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningText))
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return reasoning, content, list(calls.values())


def _usage(output: RequestOutput, counter: TotalsCounter) -> dict[str, Any]:
    """OpenAI's usage object."""
    used = usage([output])
    num_reasoning = counter.totals(output).reasoning
    if num_reasoning is not None:
        used["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return used
