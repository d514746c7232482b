"""Makes the prompt of a chat: renders its messages with the chat template, and tokenizes the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycore.client.inputs import ParsedPrompt, PromptImages
from raycore.parts.images.server import with_images
from raycore.server.contract.engine import ServingEngine
from raycore.server.generation.limits import check_length, encode_prompt
from raycore.server.generation.sampling import asked_length
from raycore.server.http.errors import APIError, unsupported
from raycore.server.options import RESERVED_TEMPLATE_VARIABLES, ServerOptions
from raycore.server.protocol import ChatCompletionRequest, Message, TokenizeRequest, Tool
from raycore.text.media_parts import MediaPart, take_images
from raycore.text.tokenizer import Tokenizer


def template_kwargs(request: ChatCompletionRequest) -> dict[str, Any]:
    """The request's variables for the chat template. `reasoning_effort` sets those that templates read for it."""
    effort = request.reasoning_effort
    derived: dict[str, Any] = {}
    if effort is not None:
        derived = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if request.documents is not None:
        derived["documents"] = request.documents
    return derived | (request.chat_template_kwargs or {})


def shown_tools(request: ChatCompletionRequest, options: ServerOptions) -> list[Tool] | None:
    """The tools that the chat template gets."""
    is_hidden = request.tool_choice == "none" and options.exclude_tools_when_tool_choice_none
    return None if is_hidden else request.tools


def prompt_ids(
    engine: ServingEngine,
    options: ServerOptions,
    messages: Sequence[Message],
    tools: list[Tool] | None,
    request: ChatCompletionRequest | TokenizeRequest,
    variables: dict[str, Any],
) -> list[int]:
    """The tokens of a conversation, however many they are. `variables`: those of the chat template.

    Raises:
        APIError, InvalidRequest: as `render` does, or an image is unusable.
    """
    given, images = take_images(as_dicts(messages))
    if images and engine.images.placeholder is None:
        with_images(engine.images, "", images, {}, adds_special_tokens=False)  # raises
    tokenizer = engine.get_tokenizer()
    text = render(
        tokenizer,
        options,
        given,
        tools,
        request.chat_template,
        variables,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        images=engine.images,
    )
    adds = bool(request.add_special_tokens)
    if not images:
        return tokenizer.encode(text, adds)
    fields = {name: getattr(request, name) for name in ("mm_processor_kwargs", "media_io_kwargs")}
    return with_images(engine.images, text, images, fields, adds_special_tokens=adds).token_ids


def encode(
    engine: ServingEngine,
    request: ChatCompletionRequest,
    prompt: str,
    images: Sequence[MediaPart],
    options: ServerOptions,
) -> ParsedPrompt:
    """Tokenize the prompt, with its images.

    Raises:
        APIError: it is too long.
        InvalidRequest: an image is unusable.
    """
    adds_special_tokens = bool(request.add_special_tokens)
    if images:
        if request.truncate_prompt_tokens is not None:
            raise unsupported("truncate_prompt_tokens", "prompts with images can't be cut")
        names = ("mm_processor_kwargs", "media_io_kwargs", "cache_salt")
        fields = {name: getattr(request, name) for name in names}
        parsed = with_images(engine.images, prompt, images, fields, adds_special_tokens=adds_special_tokens)
    else:
        parsed = ParsedPrompt(None, encode_prompt(engine, request, prompt, adds_special_tokens=adds_special_tokens))
    name, max_tokens = asked_length(request)
    check_length(engine, parsed.token_ids, max_tokens, name, "messages", options)
    return parsed


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
    images: PromptImages | None = None,
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
        tools=[{"type": tool.type, **tool.model_dump(exclude_unset=True)} for tool in tools] if tools else None,
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
