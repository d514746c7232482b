"""Answers `POST /inference/v1/generate`: tokens for tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from raycore.client.inputs import ParsedPrompt
from raycore.errors import InvalidRequest
from raycore.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from raycore.parts.routed_experts.server import experts_field
from raycore.parts.transfers.server import told
from raycore.server.contract.engine import ServingEngine
from raycore.server.contract.service import Context
from raycore.server.dialects.tokens.parameters import sampling_params
from raycore.server.dialects.tokens.protocol import GenerateRequest
from raycore.server.generation.jobs import Job, New, Progress, run, run_streaming, usage
from raycore.server.generation.limits import check_length
from raycore.server.generation.logprobs import LEAST, TokenNames, chat_logprobs, prompt_logprobs
from raycore.server.http.errors import APIError, unsupported
from raycore.text.media_parts import MediaPart

_ABSENT = {
    "features": "processed images aren't accepted: send content_parts",
    "ec_transfer_params": "embeddings of images can't be transferred",
}
"""Fields that are refused if they have a value, each with the reason."""


@dataclass(frozen=True)
class Generation:
    """A checked request. `answer()` runs it and returns the whole response; `events()` streams the response."""

    engine: ServingEngine
    request: GenerateRequest
    job: Job
    model: str
    names: TokenNames

    @staticmethod
    def prepare(context: Context, request: GenerateRequest) -> Generation:
        """Check a request. Raises APIError if it can't be run."""
        engine, options = context.engine, context.options
        for name, why in _ABSENT.items():
            if getattr(request, name):
                raise unsupported(name, why)
        if request.stream_options is not None and not request.stream:
            raise APIError(400, "stream_options needs stream=true", param="stream_options")
        model = context.models.find(request.model)
        params = sampling_params(request, options)
        if request.stream and params.prompt_logprobs is not None:
            raise APIError(400, "prompt_logprobs isn't supported with stream=true", param="sampling_params")
        prompt = ParsedPrompt(None, request.token_ids)
        if request.content_parts:
            prompt = _with_images(engine, request)
        check_length(engine, prompt.token_ids, params.max_tokens, "sampling_params.max_tokens", "token_ids", options)
        engine.check(prompt, params)
        request_id = context.new_id("generate-tokens", request)
        job = Job.of(context, request, prompt, params, request_id, model.lora, "sampling_params")
        names = TokenNames(engine.get_tokenizer(), options.return_tokens_as_token_ids)
        return Generation(engine, request, job, model.name, names)

    async def answer(self) -> dict[str, Any]:
        """Run the request, and return the body of the complete response."""
        (output,) = await run(self.engine, [self.job])
        body = self._body([self._choice(each, Progress().advance(each)) for each in output.outputs])
        asked = self.job.params.prompt_logprobs is not None
        return body | {
            "model": self.model,
            "created": int(time.time()),
            "usage": usage([output]),
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs or []) if asked else None,
            "prompt_token_ids": output.prompt_token_ids if self.request.return_token_ids else None,
            "kv_transfer_params": output.kv_transfer_params,
        }

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Run the request, and yield the events of the streamed response."""
        options = self.request.stream_options
        has_usage = options is not None and bool(options.include_usage)
        has_usage_in_each = options is not None and has_usage and bool(options.continuous_usage_stats)
        progress = [Progress() for _ in range(self.job.params.n)]
        output: RequestOutput | None = None
        is_begun = False
        async with aclosing(run_streaming(self.engine, [self.job])) as outputs:
            async for output in outputs:
                for each in output.outputs:
                    new = progress[each.index].advance(each)
                    if not (new.token_ids or new.finish_reason or (new.text and self._has_text)):
                        continue
                    event = self._body([self._choice(each, new)])
                    event["usage"] = usage([output]) if has_usage_in_each else None
                    if self.request.return_token_ids and not is_begun:
                        event["prompt_token_ids"] = output.prompt_token_ids
                    is_begun = True
                    yield event
        if output is not None and has_usage:
            yield self._body([]) | {"usage": usage([output])}

    @property
    def _has_text(self) -> bool:
        return self.request.output_mode == "text"

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"request_id": self.job.request_id, "output_mode": self.request.output_mode, "choices": choices}

    def _choice(self, completion: CompletionOutput, new: New) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": completion.index,
            "token_ids": new.token_ids,
            "logprobs": None if new.logprobs is None else self._logprobs(new.token_ids, new.logprobs),
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
            "weight_versions": None if new.weight_versions is None else [asdict(span) for span in new.weight_versions],
            **experts_field(new.routed_experts),
            **told(completion),
        }
        return choice | {"text": new.text} if self._has_text else choice

    def _logprobs(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
        num_top = self.job.params.logprobs or 0
        if self._has_text:
            return chat_logprobs(self.names, token_ids, positions, num_top)
        pairs = zip(token_ids, positions, strict=True)
        return {"content": [_of_position(token_id, position, num_top) for token_id, position in pairs]}


def _with_images(engine: ServingEngine, request: GenerateRequest) -> ParsedPrompt:
    parts: list[MediaPart] = []
    for number, part in enumerate(request.content_parts or ()):
        where = f"content_parts[{number}]"
        if part.get("type") != "image_url" or not isinstance(part.get("url"), str):
            raise APIError(400, f"{where} isn't an image: {{'type': 'image_url', 'url': ...}}", param="content_parts")
        parts.append(MediaPart("url", part["url"], part.get("uuid"), where))
    given = {"multi_modal_data": {"image": parts}, "cache_salt": request.cache_salt}
    try:
        ids, features, data = engine.images.complete(
            "content_parts", request.token_ids, given, adds_special_tokens=False
        )
    except InvalidRequest as error:
        raise APIError(400, str(error), param="content_parts") from error
    return ParsedPrompt(None, ids, features=features, feature_data=data)


def _of_position(token_id: int, position: PositionLogprobs, num_top: int) -> dict[str, Any]:
    """The log probabilities at a position: of the token, and of the most likely ones, by rank."""
    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)[:num_top]
    top = [_entry(other, entry) for other, entry in ranked]
    return {**_entry(token_id, position[token_id]), "top_logprobs": top}


def _entry(token_id: int, entry: Logprob) -> dict[str, Any]:
    logprob = entry.logprob if entry.logprob > LEAST else LEAST  # also for nan
    return {"token_id": token_id, "logprob": logprob, "rank": entry.rank}
