"""Answers `POST /v1/chat/completions/derender` and `/v1/completions/derender`: the response for tokens.

It is what rendering began: another server has continued the rendered tokens, and here its tokens become the response
that this server would have sent. Streams need no session: a request has an event's tokens and all before them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from raycore.client.ask import Ask
from raycore.client.inputs import ParsedPrompt
from raycore.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from raycore.sampling_params import SamplingParams
from raycore.server.chat.chat import Chat
from raycore.server.chat.message import MessageRun, delta_of
from raycore.server.chat.plan import MessagePlan
from raycore.server.contract.engine import ServingEngine
from raycore.server.contract.service import Context
from raycore.server.dialects.openai.completions import Completion
from raycore.server.dialects.tokens.protocol import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    GivenChoice,
    GivenResponse,
    StreamState,
)
from raycore.server.generation.envelope import Envelope
from raycore.server.generation.jobs import Job, Progress
from raycore.server.generation.logprobs import TokenNames
from raycore.server.generation.sampling import completion_params
from raycore.server.http.errors import APIError
from raycore.server.options import ServerOptions
from raycore.server.protocol import ChatCompletionRequest, CompletionRequest
from raycore.text.detokenizer import SequenceText
from raycore.text.tokenizer import Tokenizer


def derender_chat(context: Context, body: DerenderChatRequest) -> dict[str, Any]:
    """The chat response, or the event of a chat's stream with the new state. Raises APIError if the body is invalid."""
    engine = context.engine
    given = _given(body.generate_chunk if body.stream else body.generate_response, body.stream)
    ids = body.prompt_token_ids or given.prompt_token_ids or []
    _check_sizes(engine, [given], [ids], context.options, body.stream_state)
    chat = _chat(context, body, given)
    if not body.stream:
        output = _whole(engine, given, chat.message.job.params, ids)
        return _with_usage(chat.body(chat.message.read(output)), body.prompt_tokens, given.request_id)
    state = body.stream_state or StreamState()
    choices: list[dict[str, Any]] = []
    if given.choices:
        progress, reader = Progress(), chat.message.plan.reader()
        last = None
        for output in _steps(engine, given.choices[0], state, chat.message.job.params, ids):
            last = delta_of(output, output.outputs[0], progress, reader)
        assert last is not None
        told = chat.choices(last)
        delta = {} if state.role_sent else {"role": chat.role, "content": ""}
        for each in told:
            delta |= each["delta"]
        end = told[-1] if told else {"logprobs": None, "finish_reason": None}
        choices = [{**end, "index": given.choices[0].index, "delta": delta}]
        if told:
            choices[0]["logprobs"] = told[0]["logprobs"]
    return _event(chat.envelope.around("chat.completion.chunk", choices, None), given, state, body.prompt_tokens)


def derender_completion(context: Context, body: DerenderCompletionRequest) -> dict[str, Any]:
    """The response of completions, or the event of a stream with the new state. Raises APIError likewise."""
    engine, options = context.engine, context.options
    if body.stream:
        responses = [_given(body.generate_chunk, True)]
    else:
        responses = body.generate_responses or []
        if not responses:
            raise APIError(400, "generate_responses is empty", param="generate_responses")
    ids = _each(body, "prompt_token_ids", responses)
    counts = [count or 0 for count in _each(body, "prompt_tokens", responses)]
    ids = [given or response.prompt_token_ids or [] for given, response in zip(ids, responses, strict=True)]
    _check_sizes(engine, responses, ids, options, body.stream_state)
    num_top = max(map(_num_top, responses), default=None, key=lambda count: -1 if count is None else count)
    request = (body.completion_request or CompletionRequest()).model_copy(update={"logprobs": num_top})
    model = context.models.find(body.model)
    if body.completion_request is None:
        params = SamplingParams()
    else:
        params = completion_params(request, engine.default_sampling_params, options)
    name = responses[0].request_id
    names = TokenNames.of(request, engine.get_tokenizer(), options)
    jobs = [Job(Ask(ParsedPrompt(None, each), params, name), params) for each in ids]
    envelope = Envelope.of(request, model.name, name, options)
    completion = Completion(engine, request, envelope, jobs, [None] * len(jobs), names, [[] for _ in jobs])
    if not body.stream:
        outputs = [_whole(engine, given, params, each) for given, each in zip(responses, ids, strict=True)]
        answer = completion.body(outputs)
        for number, choice in enumerate(answer["choices"]):
            choice["index"] = number
        return _with_usage(answer, sum(counts), name)
    state = body.stream_state or StreamState()
    choices: list[dict[str, Any]] = []
    (given,) = responses
    if given.choices:
        progress, choice = Progress(), None
        for output in _steps(engine, given.choices[0], state, params, ids[0]):
            choice = completion.choice(0, 0, progress, output)
        empty = {"text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        choices = [{**(choice or empty), "index": given.choices[0].index}]
    return _event(envelope.around("text_completion", choices, None), given, state, counts[0])


def _given(response: GivenResponse | None, is_event: bool) -> GivenResponse:
    name = "generate_chunk" if is_event else "generate_response"
    if response is None:
        raise APIError(400, f"{name} is missing: stream={str(is_event).lower()} needs it", param=name)
    if is_event and len(response.choices) > 1:
        raise APIError(400, f"{name} has {len(response.choices)} choices: send each with its own state", param=name)
    return response


def _each(body: DerenderCompletionRequest, name: str, responses: Sequence[GivenResponse]) -> list[Any]:
    """A field's value for each response."""
    given: Any = getattr(body, name)
    if given is None:
        return [None] * len(responses)
    if body.stream:
        return [given]
    listed = cast("list[Any]", given) if isinstance(given, list) else []
    if len(listed) != len(responses):
        raise APIError(400, f"{name} must be a list with an entry for each of generate_responses", param=name)
    return listed


def _check_sizes(
    engine: ServingEngine,
    responses: Sequence[GivenResponse],
    prompts: Sequence[Sequence[int]],
    options: ServerOptions,
    state: StreamState | None,
) -> None:
    """Raise APIError if there is more than the engine could have generated, or a token doesn't exist."""
    most, vocab_size = engine.max_model_len, engine.get_tokenizer().vocab_size
    choices = [choice for response in responses for choice in response.choices]
    if len(choices) > options.max_sequences:
        raise APIError(400, f"choices: {len(choices)} are given; at most {options.max_sequences} are allowed")
    before = [] if state is None else state.output_token_ids
    for ids in [*prompts, *([*before, *(choice.token_ids or ())] for choice in choices)]:
        if len(ids) > most:
            raise APIError(400, f"{len(ids)} tokens are given, and the model's context has {most}")
        unknown = next((each for each in ids if not 0 <= each < vocab_size), None)
        if unknown is not None:
            raise APIError(400, f"token {unknown} isn't in the tokenizer's vocabulary")


def _chat(context: Context, body: DerenderChatRequest, given: GivenResponse) -> Chat:
    """The chat whose response is made. Without a request, all of the text is content."""
    engine, options, model = context.engine, context.options, context.models.find(body.model)
    shown = {"top_logprobs": _num_top(given), "stream_options": None}
    if body.chat_request is not None:
        chat = Chat.prepare(context, body.chat_request, model, given.request_id)
        return replace(chat, request=body.chat_request.model_copy(update=shown))
    if options.reasoning_parser is not None or options.tool_call_parser is not None:
        raise APIError(400, "chat_request is missing: what the parsers find depends on it", param="chat_request")
    request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": ""}]})
    names = TokenNames.of(request, engine.get_tokenizer(), options)
    job = Job(Ask(ParsedPrompt(None, []), SamplingParams(), given.request_id), SamplingParams())
    plan = MessagePlan(None, None, None, "response_format")
    message = MessageRun(engine, request, job, plan, names, "")
    envelope = Envelope.of(request, model.name, given.request_id, options)
    return Chat(request.model_copy(update=shown), envelope, message, options.response_role)


def _num_top(response: GivenResponse) -> int | None:
    """How many alternatives the log probabilities have at most. None: there are no log probabilities."""
    entries = [each for choice in response.choices if choice.logprobs for each in choice.logprobs.content or ()]
    has_any = any(choice.logprobs is not None for choice in response.choices)
    return max((len(each.top_logprobs) for each in entries), default=0) if has_any else None


def _whole(
    engine: ServingEngine, given: GivenResponse, params: SamplingParams, prompt_token_ids: list[int]
) -> RequestOutput:
    """A complete output, with the texts of its tokens."""
    if not given.choices:
        raise APIError(400, f"the response {given.request_id!r} has no choices", param="choices")
    for number, choice in enumerate(given.choices):
        if not choice.token_ids:
            raise APIError(400, f"choices.{number}.token_ids is empty", param="choices")
    steps = [_steps(engine, choice, StreamState(), params, prompt_token_ids)[-1] for choice in given.choices]
    outputs = [replace(step.outputs[0], index=number) for number, step in enumerate(steps)]
    return RequestOutput(given.request_id, None, prompt_token_ids, outputs=outputs, finished=True)


def _steps(
    engine: ServingEngine,
    choice: GivenChoice,
    state: StreamState,
    params: SamplingParams,
    prompt_token_ids: list[int],
) -> list[RequestOutput]:
    """The output of a choice after each event of its stream, the last of which is `choice`."""
    tokenizer = engine.get_tokenizer()
    text = SequenceText(tokenizer, params, prompt_token_ids)
    ids = [*state.output_token_ids, *(choice.token_ids or ())]
    ends: list[int] = []
    for count in state.output_chunk_lens:
        ends.append(count + (ends[-1] if ends else 0))
    has_stop_token = choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)
    steps: list[RequestOutput] = []
    begin = 0
    for end in [*ends, len(ids)]:
        is_last = len(steps) == len(ends)
        text.append(ids[begin : end - (is_last and has_stop_token and not params.include_stop_str_in_output)])
        if is_last and choice.finish_reason is not None:
            text.finish()
        output = CompletionOutput(0, text.text, ids[:end])
        if is_last:
            output = replace(
                output,
                logprobs=_positions(tokenizer, choice, len(state.output_token_ids)),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
        steps.append(RequestOutput("", None, prompt_token_ids, outputs=[output]))
        begin = end
    return steps


def _positions(tokenizer: Tokenizer, choice: GivenChoice, num_before: int) -> list[PositionLogprobs] | None:
    """The log probabilities of all tokens; those before this event, which aren't shown again, are empty."""
    if choice.logprobs is None:
        return None
    content = choice.logprobs.content or []
    if len(content) != len(choice.token_ids or ()):
        message = f"logprobs.content has {len(content)} entries for {len(choice.token_ids or ())} token_ids"
        raise APIError(400, message, param="choices")
    found: list[PositionLogprobs] = [{} for _ in range(num_before)]
    for entry in content:
        given = {each.token_id: each for each in (entry, *entry.top_logprobs)}
        ranked = {each.token_id: rank for rank, each in enumerate(entry.top_logprobs, 1)}
        found.append(
            {
                token_id: Logprob(each.logprob, each.rank or ranked.get(token_id), tokenizer.token_text(token_id))
                for token_id, each in given.items()
            }
        )
    return found


def _with_usage(answer: dict[str, Any], num_prompt: int | None, request_id: str) -> dict[str, Any]:
    """The response, with the number of the prompt's tokens as the request says it."""
    used = answer["usage"]
    used |= {"prompt_tokens": num_prompt or 0, "total_tokens": (num_prompt or 0) + used["completion_tokens"]}
    return answer | {"id": request_id, "created": int(time.time())}


def _event(chunk: dict[str, Any], given: GivenResponse, state: StreamState, num_prompt: int | None) -> dict[str, Any]:
    """The event, and the state after it."""
    if given.usage is not None:
        prompt, output = num_prompt or given.usage.prompt_tokens, given.usage.completion_tokens or 0
        chunk["usage"] = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    new = [token_id for choice in given.choices for token_id in choice.token_ids or ()]
    after = {
        "output_token_ids": [*state.output_token_ids, *new],
        "output_chunk_lens": [*state.output_chunk_lens, *([len(new)] if new else [])],
        "role_sent": state.role_sent or bool(given.choices),
    }
    return {"chunk": chunk, "stream_state": after}
