"""Answers `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from raycore.client.inputs import ParsedPrompt
from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from raycore.parts.routed_experts.server import experts_field
from raycore.parts.transfers.server import told
from raycore.sampling_params import SamplingParams
from raycore.server.contract.engine import ServingEngine
from raycore.server.contract.service import Context
from raycore.server.generation.envelope import Envelope
from raycore.server.generation.jobs import Job, New, Progress, run, run_streaming, usage
from raycore.server.generation.limits import check_length, cut_prompt, encode_prompt
from raycore.server.generation.logprobs import CompletionLogprobs, TokenNames, num_shown, prompt_logprobs
from raycore.server.generation.positions import (
    OutputPieces,
    has_hidden_stop_token,
    new_pieces,
    prompt_pieces,
    prompt_starts,
)
from raycore.server.generation.sampling import completion_params
from raycore.server.http.errors import APIError
from raycore.server.options import ServerOptions
from raycore.server.protocol import CompletionRequest
from raycore.text.detokenizer import IncrementalDetokenizer
from raycore.text.tokenizer import REPLACEMENT, Tokenizer

_MAX_FILE_OVERHEAD = 1 << 16


@dataclass(frozen=True)
class Completion:
    """A checked request. `answer()` runs it and returns the whole response; `events()` streams the response."""

    engine: ServingEngine
    request: CompletionRequest
    envelope: Envelope
    jobs: list[Job]
    prompts: list[str | None]
    names: TokenNames
    starts: list[list[int]]
    """For each prompt, where its tokens begin in its text. Empty if no log probabilities of prompts are shown."""

    @staticmethod
    def prepare(context: Context, request: CompletionRequest) -> Completion:
        """Check a request and tokenize its prompts. Raises APIError if the request is invalid."""
        engine, options, model = context.engine, context.options, context.models.find(request.model)
        params = completion_params(request, engine.default_sampling_params, options)
        given, ids = _prompts(request, params.n, engine, options)
        embeds = _embeds(request, params, engine, options)
        texts, prompts = [None] * len(embeds) + given, [*embeds, *(ParsedPrompt(None, each) for each in ids)]
        if embeds:
            _check_count(len(prompts), params.n, options)
        for prompt in prompts:
            check_length(engine, prompt.token_ids, request.max_tokens, "max_tokens", "prompt", options)
            engine.check(prompt, params)
        request_id = context.new_id("cmpl", request)
        names = [request_id] if len(prompts) == 1 else [f"{request_id}-{i}" for i in range(len(prompts))]
        jobs = [
            Job.of(context, request, prompt, params, name, model.lora)
            for name, prompt in zip(names, prompts, strict=True)
        ]
        names = TokenNames.of(request, engine.get_tokenizer(), options)
        starts = _starts(request, names.tokenizer, texts, [prompt.token_ids for prompt in prompts])
        envelope = Envelope.of(request, model.name, request_id, options)
        return Completion(engine, request, envelope, jobs, texts, names, starts)

    async def answer(self) -> dict[str, Any]:
        """Run the request, and return the body of the complete response."""
        return self.body(await run(self.engine, self.jobs))

    def body(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The body of the complete response. `outputs`: the complete output of each prompt."""
        choices: list[dict[str, Any]] = []
        for number, output in enumerate(outputs):
            for completion in output.outputs:
                choice = self.choice(number, completion.index, Progress(), output)
                assert choice is not None, "all of it is new"
                if self.request.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
                choices.append(choice)
        return self.envelope.around("text_completion", choices, usage(self._counted(outputs))) | told(outputs[0])

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Run the request, and yield the events of the streamed response."""
        progress = [[Progress() for _ in range(job.params.n)] for job in self.jobs]
        numbers = {job.request_id: number for number, job in enumerate(self.jobs)}
        latest: dict[int, RequestOutput] = {}
        async with aclosing(run_streaming(self.engine, self.jobs)) as outputs:
            async for output in outputs:
                number = numbers[output.request_id]
                latest[number] = output
                used = usage(self._counted(list(latest.values()))) if self.envelope.has_usage_in_each else None
                for completion in output.outputs:
                    choice = self.choice(number, completion.index, progress[number][completion.index], output)
                    if choice is not None:
                        yield self.envelope.around("text_completion", [choice], used)
        if self.envelope.has_usage:
            yield self.envelope.around("text_completion", [], usage(self._counted(list(latest.values()))))

    def choice(self, number: int, index: int, progress: Progress, output: RequestOutput) -> dict[str, Any] | None:
        """A choice with the new part of one sequence; None if that part has nothing for the client."""
        request, is_first = self.request, not progress.is_begun
        completion = output.outputs[index]
        echoed = self._echoed(number, completion) if request.echo and is_first else None
        if echoed is not None and echoed.endswith(REPLACEMENT) and not (completion.text or completion.finish_reason):
            return None  # the next tokens may complete the prompt's last character
        new = progress.advance(completion)
        if request.max_tokens == 0:
            # leave out the one token that the engine had to generate
            new = New("", [], [], new.finish_reason and "length", None, new.weight_versions, new.routed_experts)
        text = (echoed or "") + new.text
        wants_tokens = request.logprobs is not None or request.return_token_ids
        if not (text or new.finish_reason or (wants_tokens and new.token_ids)):
            return None
        progress.is_begun = True
        choice: dict[str, Any] = {
            "index": number * self.jobs[number].params.n + index,
            "text": text,
            "logprobs": self._logprobs(number, completion, new, progress, output.prompt_logprobs, echoed),
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
            **experts_field(new.routed_experts),
            **told(completion),
        }
        if request.return_token_ids:
            shows_prompt = is_first and not self.jobs[number].prompt.has_unknown_tokens
            choice |= {
                "prompt_token_ids": output.prompt_token_ids if shows_prompt else None,
                "token_ids": new.token_ids,
            }
        return choice

    def _logprobs(
        self,
        number: int,
        completion: CompletionOutput,
        new: New,
        progress: Progress,
        of_prompt: PromptLogprobs | None,
        echoed: str | None,
    ) -> dict[str, Any] | None:
        """The `logprobs` of a choice: of the prompt, whose text is `echoed` (None: it isn't echoed), and of `new`."""
        if self.request.logprobs is None:
            return None
        job, num_top = self.jobs[number], num_shown(self.request, self.request.logprobs)
        logprobs = CompletionLogprobs(self.names, num_top)
        if echoed is not None:
            logprobs.add(job.prompt.token_ids, of_prompt or [], prompt_pieces(self.starts[number], echoed))
        if progress.pieces is None:
            skip = job.params.skip_special_tokens
            progress.pieces = OutputPieces(self.names.tokenizer, skip, job.prompt.token_ids, len(echoed or ""))
        pieces = new_pieces(progress.pieces, new.token_ids, completion, job.params)
        logprobs.add(new.token_ids, new.logprobs or [], pieces)
        return logprobs.as_dict()

    def _echoed(self, number: int, completion: CompletionOutput) -> str:
        """The prompt's text, without the beginning of a character that the output so far completes."""
        given, job = self.prompts[number], self.jobs[number]
        if given is not None:
            return given
        tokenizer = self.names.tokenizer
        prompt = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        prompt.append(job.prompt.token_ids)
        prompt.finish()
        if self.request.max_tokens == 0 or not prompt.text.endswith(REPLACEMENT):
            return prompt.text
        output = IncrementalDetokenizer(tokenizer, job.params.skip_special_tokens, job.prompt.token_ids)
        has_stop_token = has_hidden_stop_token(completion, job.params)
        output.append(completion.token_ids[:-1] if has_stop_token else completion.token_ids)
        output.finish()
        return prompt.text[: len(prompt.text) - output.num_replaced]

    def _counted(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs as they count for the usage: without tokens that the client doesn't get."""
        if self.request.max_tokens != 0:
            return outputs
        return [replace(output, outputs=[replace(each, token_ids=[]) for each in output.outputs]) for output in outputs]


def _starts(
    request: CompletionRequest,
    tokenizer: Tokenizer,
    texts: list[str | None],
    ids: list[list[int]],
) -> list[list[int]]:
    if request.logprobs is None or not request.echo:
        return []
    adds = request.add_special_tokens is not False
    return [
        prompt_starts(tokenizer, text, token_ids, adds_special_tokens=adds)
        for text, token_ids in zip(texts, ids, strict=True)
    ]


def _embeds(
    request: CompletionRequest, params: SamplingParams, engine: ServingEngine, options: ServerOptions
) -> list[ParsedPrompt]:
    """The prompts that are given as embeddings: token ids that stand for them, and features."""
    given = [request.prompt_embeds] if isinstance(request.prompt_embeds, str) else request.prompt_embeds or []
    if not given:
        return []
    if len(given) > options.max_sequences:  # before anything is decoded
        _check_count(len(given), 1, options, "prompt_embeds")
    most = engine.images.max_embeds_bytes
    if most is None:
        raise APIError(400, "prompt_embeds needs a server with --enable-prompt-embeds", param="prompt_embeds")
    if request.echo or params.prompt_logprobs is not None:
        field = "echo" if request.echo else "prompt_logprobs"
        raise APIError(400, f"{field} needs the prompt's tokens, and prompt_embeds has none", param=field)
    from raycore.server.dialects.openai.torch_file import read_tensor  # imported lazily: few requests need it

    found: list[ParsedPrompt] = []
    for index, text in enumerate(given):
        where = "prompt_embeds" if isinstance(request.prompt_embeds, str) else f"prompt_embeds[{index}]"
        try:
            if len(text) * 3 // 4 > most + _MAX_FILE_OVERHEAD:
                raise InvalidRequest(
                    f"{where} has more bytes than max_model_len={engine.max_model_len} embeddings; clone() a part of a "
                    "tensor before you save it"
                )
            ids, features, data = engine.images.embed(where, {"prompt_embeds": read_tensor(where, text)})
            found.append(ParsedPrompt(None, ids, features=features, feature_data=data, has_unknown_tokens=True))
        except InvalidRequest as error:
            raise APIError(400, str(error), param="prompt_embeds") from None
    return found


def _check_count(count: int, n: int, options: ServerOptions, param: str = "prompt") -> None:
    if count > options.max_sequences:
        raise APIError(400, f"{param} has {count} entries; at most {options.max_sequences} are allowed", param=param)
    if count * n > options.max_sequences:
        raise APIError(
            400,
            f"n={n} for {count} prompts makes {n * count} sequences; at most {options.max_sequences} are allowed",
            param="n",
        )


def _prompts(
    request: CompletionRequest, n: int, engine: ServingEngine, options: ServerOptions
) -> tuple[list[str | None], list[list[int]]]:
    """The prompts' texts (None for those given as token ids), and the prompts' token ids."""
    given = request.prompt
    if not given and request.prompt_embeds:
        return [], []
    if given is None:
        raise APIError(400, "prompt is missing: give prompt or prompt_embeds", param="prompt")
    if isinstance(given, str):
        given = [given]
    elif given and isinstance(given[0], int):
        given = [cast("list[int]", given)]
    prompts = cast("list[str] | list[list[int]]", given)
    if not prompts:
        raise APIError(400, "prompt is empty: there is nothing to continue", param="prompt")
    _check_count(len(prompts), n, options)
    adds = request.add_special_tokens is not False
    ids = [
        encode_prompt(engine, request, prompt, adds_special_tokens=adds)
        if isinstance(prompt, str)
        else cut_prompt(engine, request, prompt)
        for prompt in prompts
    ]
    # the text of a prompt that may have been cut is that of its tokens
    is_whole = request.truncate_prompt_tokens is None
    texts = [prompt if isinstance(prompt, str) and is_whole else None for prompt in prompts]
    for prompt, token_ids in zip(prompts, ids, strict=True):
        if not token_ids:
            raise APIError(
                400, f"the prompt {shortened(prompt)} has no tokens: there is nothing to continue", param="prompt"
            )
    return texts, ids
