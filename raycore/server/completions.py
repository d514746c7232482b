"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any, cast

from raycore.client.tokenizer import Tokenizer
from raycore.outputs import PositionLogprobs, RequestOutput
from raycore.server.errors import APIError
from raycore.server.generation import Job, Progress, ServingEngine, run, run_streaming, usage
from raycore.server.limits import check_length
from raycore.server.options import ServerOptions
from raycore.server.protocol import CompletionRequest
from raycore.server.sampling import completion_params


@dataclass(frozen=True)
class Completion:
    """One request, checked: it can be run, whole or as a stream."""

    engine: ServingEngine
    request: CompletionRequest
    model: str
    id: str
    created: int
    jobs: list[Job]
    prompts: list[str | None]

    @staticmethod
    def prepare(
        engine: ServingEngine, request: CompletionRequest, options: ServerOptions, model: str, request_id: str
    ) -> Completion:
        """Raises APIError when it can't be run."""
        tokenizer = engine.get_tokenizer()
        params = completion_params(request, engine.default_sampling_params, options)
        texts, ids = _prompts(request, tokenizer, options)
        for token_ids in ids:
            check_length(engine, token_ids, params.max_tokens, "max_tokens")
        jobs = [
            Job(token_ids, params, request_id if len(ids) == 1 else f"{request_id}-{i}", request.priority)
            for i, token_ids in enumerate(ids)
        ]
        return Completion(engine, request, model, request_id, int(time.time()), jobs, texts)

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        outputs = await run(self.engine, self.jobs)
        choices: list[dict[str, Any]] = []
        for number, output in enumerate(outputs):
            for completion in output.outputs:
                choice = self._choice(number, completion.index, Progress(), output)
                if self.request.return_token_ids:
                    choice |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": completion.token_ids}
                choices.append(choice)
        return self._envelope(choices, usage(self._counted(outputs)))

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer's events."""
        progress = [[Progress() for _ in range(job.params.n)] for job in self.jobs]
        latest: dict[int, RequestOutput] = {}
        options = self.request.stream_options
        counts_always = options is not None and options.continuous_usage_stats
        async for number, output in run_streaming(self.engine, self.jobs):
            latest[number] = output
            choices: list[dict[str, Any]] = []
            for completion in output.outputs:
                of = progress[number][completion.index]
                is_first = not of.is_begun
                choice = self._choice(number, completion.index, of, output)
                if choice["text"] or choice["finish_reason"] or is_first or choice["logprobs"]:
                    choices.append(choice)
            if choices:
                yield self._envelope(choices, usage(self._counted(list(latest.values()))) if counts_always else None)
        if options is not None and options.include_usage:
            yield self._envelope([], usage(self._counted(list(latest.values()))))

    def _choice(self, number: int, index: int, progress: Progress, output: RequestOutput) -> dict[str, Any]:
        """What is new in a sequence of a prompt's."""
        is_first = not progress.is_begun
        new = progress.advance(output.outputs[index])
        is_prompt_only = self.request.max_tokens == 0
        text = "" if is_prompt_only else new.text
        logprobs: _Logprobs | None = None
        if self.request.logprobs is not None:
            logprobs = _Logprobs(self.engine.get_tokenizer(), progress.text_offset, self.request.logprobs)
        if self.request.echo and is_first:
            text = self._prompt_text(number, output) + text
            if logprobs is not None:
                logprobs.add(output.prompt_token_ids, output.prompt_logprobs or [])
        if logprobs is not None:
            if not is_prompt_only:
                logprobs.add(new.token_ids, new.logprobs or [])
            progress.text_offset = logprobs.offset
        return {
            "index": number * self.jobs[number].params.n + index,
            "text": text,
            "logprobs": None if logprobs is None else logprobs.as_dict(),
            "finish_reason": "length" if is_prompt_only and new.finish_reason else new.finish_reason,
            "stop_reason": new.stop_reason,
        }

    def _prompt_text(self, number: int, output: RequestOutput) -> str:
        text = self.prompts[number]
        return text if text is not None else self.engine.get_tokenizer().decode(output.prompt_token_ids)

    def _counted(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs as far as the client gets them."""
        if self.request.max_tokens != 0:
            return outputs
        return [replace(output, outputs=[replace(each, token_ids=[]) for each in output.outputs]) for output in outputs]

    def _envelope(self, choices: list[dict[str, Any]], used: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": used,
        }


class _Logprobs:
    """Log probabilities in the form of completions."""

    def __init__(self, tokenizer: Tokenizer, offset: int, num_top: int) -> None:
        self.offset = offset
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add(self, token_ids: list[int], positions: list[PositionLogprobs] | list[PositionLogprobs | None]) -> None:
        """Tokens that follow, with what is known at their positions."""
        for token_id, position in zip(token_ids, positions, strict=False):
            text = self._tokenizer.token_text(token_id)
            self._tokens.append(text)
            self._offsets.append(self.offset)
            self.offset += len(text)
            if position is None:
                self._token_logprobs.append(None)
                self._top.append(None)
                continue
            self._token_logprobs.append(position[token_id].logprob)
            best = list(position.items())[: self._num_top + 1]
            self._top.append({self._tokenizer.token_text(other): each.logprob for other, each in best})

    def as_dict(self) -> dict[str, Any] | None:
        return {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }


def _prompts(
    request: CompletionRequest, tokenizer: Tokenizer, options: ServerOptions
) -> tuple[list[str | None], list[list[int]]]:
    """The prompts' texts, where they were given as such, and token ids."""
    given = request.prompt
    if isinstance(given, str):
        given = [given]
    elif given and isinstance(given[0], int):
        given = [cast("list[int]", given)]
    prompts = cast("list[str] | list[list[int]]", given)
    if not prompts:
        raise APIError(400, "prompt is empty: there is nothing to continue", param="prompt")
    if len(prompts) > options.max_prompts:
        raise APIError(400, f"prompt is a list of {len(prompts)}; at most {options.max_prompts}", param="prompt")
    adds = request.add_special_tokens is not False
    texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
    ids = [tokenizer.encode(prompt, adds) if isinstance(prompt, str) else prompt for prompt in prompts]
    for prompt, token_ids in zip(prompts, ids, strict=True):
        if not token_ids:
            raise APIError(400, f"prompt {prompt!r} has no tokens: there is nothing to continue", param="prompt")
    return texts, ids
