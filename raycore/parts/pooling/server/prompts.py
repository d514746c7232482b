"""Turns what requests give into prompts: texts, token ids, conversations. Errors name the field and the entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from raycore.client.inputs import ParsedPrompt
from raycore.errors import InvalidRequest
from raycore.parts.pooling.server.parameters import spec_of
from raycore.parts.pooling.server.protocol import InputRequest
from raycore.pooling_params import InputType, PoolingParams
from raycore.server.chat.prompt import as_dicts, render
from raycore.server.contract.engine import ServingEngine
from raycore.server.http.errors import APIError, as_api_error
from raycore.server.options import ServerOptions
from raycore.server.protocol import Message
from raycore.text.conversation import content_text
from raycore.text.cuts import Side

_MAX_SHOWN = 60
"""Characters of a prompt in an error message."""


@dataclass(frozen=True)
class Cut:
    """How prompts with too many tokens are cut."""

    max_tokens: int | None
    """None: they are refused."""
    side: Side | None = None

    @staticmethod
    def of(engine: ServingEngine, max_tokens: int | None, side: Side | None, param: str) -> Cut:
        """What a request asks for. -1 stands for as many tokens as the model takes. `param`: the field's name."""
        most = engine.max_model_len
        if max_tokens is not None and not -1 <= max_tokens <= most:
            raise APIError(400, f"{param}={max_tokens} isn't in [-1, {most}], the model's length", param=param)
        return Cut(most if max_tokens == -1 else max_tokens, side)


def check_count(count: int, param: str, options: ServerOptions) -> None:
    """Raise APIError if a request has no entries, or more than the server allows."""
    if not count:
        raise APIError(400, f"{param} is empty: give at least one entry", param=param)
    if count > options.max_sequences:
        raise APIError(400, f"{param} has {count} entries; at most {options.max_sequences} are allowed", param=param)


def input_prompts(
    engine: ServingEngine, request: InputRequest, options: ServerOptions, kind: InputType | None = None
) -> list[list[int]]:
    """The prompts that the model wants of a request's inputs, which are of one kind. Raises APIError if one of them is
    invalid."""
    if (request.input is None) == (request.messages is None):
        raise APIError(400, "give exactly one of input and messages", param="input")
    cut = Cut.of(engine, request.truncate_prompt_tokens, request.truncation_side, "truncate_prompt_tokens")
    if request.input is None:
        return _of_conversations(engine, request, cast("Any", request.messages), "messages", cut, options, kind)
    given = request.input
    adds = request.add_special_tokens is not False
    if isinstance(given, str):
        return text_prompts(engine, [given], "input", cut, kind, adds_special_tokens=adds)
    first = given[0] if given else None
    if isinstance(first, Message) or (isinstance(first, list) and first and isinstance(first[0], Message)):
        return _of_conversations(engine, request, cast("Any", given), "input", cut, options, kind)
    if isinstance(first, int):
        return [_cut_ids(engine, cast("list[int]", given), "input", cut, kind)]
    check_count(len(given), "input", options)
    if isinstance(first, str):
        return text_prompts(engine, cast("list[str]", given), "input", cut, kind, adds_special_tokens=adds)
    lists = cast("list[list[int]]", given)
    return [_cut_ids(engine, ids, f"input[{i}]", cut, kind) for i, ids in enumerate(lists)]


def text_prompts(
    engine: ServingEngine,
    texts: Sequence[str],
    param: str,
    cut: Cut,
    kind: InputType | None = None,
    *,
    adds_special_tokens: bool = True,
) -> list[list[int]]:
    """The prompts that the model wants of texts of one kind. Raises APIError if one has no tokens, or too many and they
    aren't cut."""
    tokenizer = engine.get_tokenizer()
    if cut.max_tokens is None:
        encoded = tokenizer.encode_batch(texts, adds_special_tokens)
    else:
        encoded = tokenizer.encode_within(texts, cut.max_tokens, adds_special_tokens, cut.side)
    prompts: list[list[int]] = []
    for index, (text, ids) in enumerate(zip(texts, encoded, strict=True)):
        where = param if len(texts) == 1 else f"{param}[{index}]"
        if not ids:
            raise APIError(400, f"{where}={_shown(text)} has no tokens", param=param)
        prompts.append(_wanted(engine, ids, where, kind, is_text=True))
    return prompts


def _wanted(
    engine: ServingEngine, token_ids: list[int], where: str, kind: InputType | None, *, is_text: bool = False
) -> list[int]:
    """The prompt that the model wants of an input's tokens. Models of late interaction cut long ones."""
    try:
        prompt = spec_of(engine).prompt(token_ids, kind, max_length=engine.max_model_len, is_text=is_text)
    except InvalidRequest as error:
        raise APIError(400, f"{where}: {error}", param=_field(where)) from error
    check_length(engine, prompt, where)
    return prompt


def check_length(engine: ServingEngine, token_ids: Sequence[int], where: str, param: str | None = None) -> None:
    """Raise APIError if a prompt has more tokens than the model takes.

    Args:
        where: the prompt's field and index, or another name of it.
        param: the prompt's field. None: the one in `where`.
    """
    most = engine.max_model_len
    if len(token_ids) > most:
        raise APIError(
            400,
            f"this model's maximum context length is {most} tokens, but {where} has {len(token_ids)}. Shorten it, or "
            "set truncate_prompt_tokens to have it cut.",
            param=param or _field(where),
            code="context_length_exceeded",
        )


def check_prompts(engine: ServingEngine, prompts: Sequence[list[int]], params: PoolingParams, param: str) -> None:
    """Raise APIError if one of the prompts could never run. The error names it. `param`: the prompts' field."""
    for index, token_ids in enumerate(prompts):
        try:
            engine.check(ParsedPrompt(None, token_ids), params)
        except InvalidRequest as error:
            told = as_api_error(error)
            if told.param in PoolingParams.__struct_fields__:
                raise told from error
            where = param if len(prompts) == 1 else f"{param}[{index}]"
            raise APIError(told.status, f"{where}: {told.message}", param=param, code=told.code) from error


def document_text(document: str | dict[str, Any], where: str) -> str:
    """The text of a document: as it is, under `text`, or the text parts under `content`."""
    if isinstance(document, str):
        return document
    if document.keys() == {"content"} and isinstance(document["content"], list):
        return parts_text(cast("list[object]", document["content"]), where)
    if document.keys() != {"text"}:
        raise APIError(
            400, f"{where} has {sorted(document)}: it must be a text, or have only text or content", param=_field(where)
        )
    if not isinstance(document["text"], str):
        raise APIError(400, f"{where}.text is {_shown(document['text'])}: it must be a string", param=_field(where))
    return _of_whole_characters(document["text"], where)


def parts_text(parts: list[Any], where: str) -> str:
    """The text of content parts, as chat messages have them. Raises APIError if one isn't text."""
    try:
        text = content_text("user", parts, where)
    except InvalidRequest as error:
        raise APIError(400, str(error), param=_field(where)) from error
    return _of_whole_characters(text, where)


def _of_whole_characters(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"{text[error.start]!a} is half of a surrogate pair, not a character"
        raise APIError(400, f"{where}: {half}", param=_field(where)) from None
    return text


def _of_conversations(
    engine: ServingEngine,
    request: InputRequest,
    given: list[Message] | list[list[Message]],
    param: str,
    cut: Cut,
    options: ServerOptions,
    kind: InputType | None,
) -> list[list[int]]:
    conversations = cast("list[list[Message]]", given if isinstance(given[0], list) else [given])
    check_count(len(conversations), param, options)
    if request.add_generation_prompt and request.continue_final_message:
        raise APIError(
            400,
            "continue_final_message=true continues the last message, add_generation_prompt=true begins a new one: set "
            "only one of them",
            param="continue_final_message",
        )
    texts = [
        render(
            engine.get_tokenizer(),
            options,
            as_dicts(conversation),
            None,
            request.chat_template,
            request.chat_template_kwargs or {},
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        for conversation in conversations
    ]
    return text_prompts(engine, texts, param, cut, kind, adds_special_tokens=bool(request.add_special_tokens))


def _cut_ids(engine: ServingEngine, token_ids: list[int], where: str, cut: Cut, kind: InputType | None) -> list[int]:
    if not token_ids:
        raise APIError(400, f"{where} is an empty list: it has no tokens", param=_field(where))
    if cut.max_tokens is not None and len(token_ids) > cut.max_tokens:
        if not cut.max_tokens:
            raise APIError(400, f"truncate_prompt_tokens=0 leaves {where} no tokens", param="truncate_prompt_tokens")
        side = cut.side or engine.get_tokenizer().truncation_side
        token_ids = token_ids[-cut.max_tokens :] if side == "left" else token_ids[: cut.max_tokens]
    return _wanted(engine, token_ids, where, kind)


def _field(where: str) -> str:
    return where.partition("[")[0]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
