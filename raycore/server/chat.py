"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from raycore.client.tokenizer import Tokenizer
from raycore.outputs import PositionLogprobs, RequestOutput
from raycore.server.errors import APIError
from raycore.server.generation import Job, New, Progress, ServingEngine, run, run_streaming, usage
from raycore.server.limits import check_length
from raycore.server.options import ServerOptions
from raycore.server.protocol import ChatCompletionRequest, Message, Tool
from raycore.server.sampling import chat_params


@dataclass(frozen=True)
class Chat:
    """One request, checked: it can be run, whole or as a stream."""

    engine: ServingEngine
    request: ChatCompletionRequest
    model: str
    id: str
    created: int
    job: Job

    @staticmethod
    def prepare(
        engine: ServingEngine, request: ChatCompletionRequest, options: ServerOptions, model: str, request_id: str
    ) -> Chat:
        """Raises APIError when it can't be run."""
        params = chat_params(request, engine.default_sampling_params, options)
        kwargs = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        text = render(
            engine.get_tokenizer(),
            options,
            request.messages,
            request.tools if request.tool_choice != "none" else None,
            request.chat_template,
            kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        token_ids = engine.get_tokenizer().encode(text, bool(request.add_special_tokens))
        check_length(engine, token_ids, params.max_tokens, "max_completion_tokens")
        job = Job(token_ids, params, request_id, request.priority)
        return Chat(engine, request, model, request_id, int(time.time()), job)

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        (output,) = await run(self.engine, [self.job])
        choices: list[dict[str, Any]] = []
        for completion in output.outputs:
            choice: dict[str, Any] = {
                "index": completion.index,
                "message": {"role": self._role, "content": self._echoed() + completion.text, "refusal": None},
                "logprobs": self._logprobs(completion.token_ids, completion.logprobs),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            if self.request.return_token_ids:
                choice["token_ids"] = completion.token_ids
            choices.append(choice)
        return self._envelope("chat.completion", choices, usage([output]))

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer's events: the role first, text as it comes, then the reason why it ended."""
        options = self.request.stream_options
        counts_always = options is not None and options.continuous_usage_stats
        progress = [Progress() for _ in range(self.job.params.n)]
        output: RequestOutput | None = None
        roles = [self._delta(i, {"role": self._role, "content": self._echoed()}) for i in range(len(progress))]
        async for _, output in run_streaming(self.engine, [self.job]):
            used = usage([output]) if counts_always else None
            for role in roles:
                yield self._envelope("chat.completion.chunk", [role], used)
            roles = []
            for completion in output.outputs:
                new = progress[completion.index].advance(completion)
                if new.text or new.finish_reason or new.logprobs:
                    yield self._envelope("chat.completion.chunk", [self._choice(completion.index, new)], used)
        if output is not None and options is not None and options.include_usage:
            yield self._envelope("chat.completion.chunk", [], usage([output]))

    @property
    def _role(self) -> str:
        return self.request.messages[-1].role if self.request.continue_final_message else "assistant"

    def _echoed(self) -> str:
        """The beginning of the message, where the client wants it back."""
        content = self.request.messages[-1].content
        return content if self.request.echo and isinstance(content, str) else ""

    def _choice(self, index: int, new: New) -> dict[str, Any]:
        choice = self._delta(index, {"content": new.text} if new.text else {})
        choice["logprobs"] = self._logprobs(new.token_ids, new.logprobs)
        choice["finish_reason"] = new.finish_reason
        if new.stop_reason is not None:
            choice["stop_reason"] = new.stop_reason
        if self.request.return_token_ids:
            choice["token_ids"] = new.token_ids
        return choice

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, token_ids: list[int], positions: list[PositionLogprobs] | None) -> dict[str, Any] | None:
        if positions is None:
            return None
        tokenizer, num_top = self.engine.get_tokenizer(), self.request.top_logprobs or 0
        return {
            "content": [
                _token(tokenizer, token_id, position, num_top)
                for token_id, position in zip(token_ids, positions, strict=False)
            ]
        }

    def _envelope(self, kind: str, choices: list[dict[str, Any]], used: dict[str, Any] | None) -> dict[str, Any]:
        envelope: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if used is not None:
            envelope["usage"] = used
        return envelope


def render(
    tokenizer: Tokenizer,
    options: ServerOptions,
    messages: list[Message],
    tools: list[Tool] | None,
    chat_template: str | None,
    chat_template_kwargs: dict[str, Any],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    """The conversation as the model's text.

    Raises:
        APIError: the request brings a template and may not.
        InvalidRequest: the template doesn't take the conversation.
    """
    if chat_template is not None and not options.trust_request_chat_template:
        raise APIError(
            400,
            "chat_template: this server renders with its own; start it with --trust-request-chat-template to allow it",
            param="chat_template",
        )
    reserved = {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    taken = sorted(reserved & chat_template_kwargs.keys())
    if taken:
        raise APIError(400, f"chat_template_kwargs has {taken[0]!r}: give it as itself", param="chat_template_kwargs")
    return tokenizer.apply_chat_template(
        [message.model_dump(exclude_unset=True) for message in messages],
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
        chat_template=chat_template or options.chat_template,
        tools=[tool.model_dump(exclude_unset=True) for tool in tools] if tools else None,
        **chat_template_kwargs,
    )


def _token(tokenizer: Tokenizer, token_id: int, position: PositionLogprobs, num_top: int) -> dict[str, Any]:
    # the first entry is the token that is there; it is among the most likely ones too only where it belongs
    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)[:num_top]
    return _entry(tokenizer, token_id, position) | {
        "top_logprobs": [_entry(tokenizer, other, position) for other, _ in ranked]
    }


def _entry(tokenizer: Tokenizer, token_id: int, position: PositionLogprobs) -> dict[str, Any]:
    text = tokenizer.token_text(token_id)
    return {"token": text, "logprob": position[token_id].logprob, "bytes": list(text.encode())}
