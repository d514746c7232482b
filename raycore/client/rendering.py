"""Makes the prompts of one call: checks them, renders conversations, and tokenizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from raycore.client.client import EngineClient
from raycore.client.inputs import ParsedPrompt, Prompt, as_prompt_list, has_images, parse_prompts
from raycore.client.tokenization import Tokenization
from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.lora.request import LoRARequest
from raycore.text.media_parts import take_images

Messages = Sequence[dict[str, Any]]
"""A conversation."""
Adapters = LoRARequest | Sequence[LoRARequest | None] | None
"""An adapter for all prompts, or one for each, where None means none."""
_CONTENT_FORMATS = ("auto", "string", "openai")


def completion_prompts(
    client: EngineClient,
    prompts: Prompt | Sequence[Prompt],
    tokenization_kwargs: Mapping[str, Any] | None = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
) -> list[ParsedPrompt]:
    """Return the prompts of a call of `LLM.generate`, whose arguments these are.

    Raises:
        InvalidRequest: a prompt or an argument is invalid; the message names it.
    """
    how = Tokenization.of(None, tokenization_kwargs, client.checks.max_model_len)
    given = as_prompt_list(prompts)
    if mm_processor_kwargs:
        given = [_with_settings(prompt, mm_processor_kwargs) if has_images(prompt) else prompt for prompt in given]
    return parse_prompts(given, client.tokenizer, how, client.images)


def chat_prompts(
    client: EngineClient,
    messages: Messages | Sequence[Messages],
    *,
    chat_template: str | None,
    chat_template_content_format: str,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: list[dict[str, Any]] | None,
    chat_template_kwargs: dict[str, Any] | None,
    tokenization_kwargs: Mapping[str, Any] | None,
    mm_processor_kwargs: dict[str, Any] | None,
) -> list[ParsedPrompt]:
    """Return the prompts of a call of `LLM.chat`, whose arguments these are.

    Raises:
        InvalidRequest: a conversation or an argument is invalid; the message names it.
    """
    if chat_template_content_format not in _CONTENT_FORMATS:
        raise InvalidRequest(
            f"chat_template_content_format={shortened(chat_template_content_format)} isn't one of "
            f"{', '.join(map(repr, _CONTENT_FORMATS))}"
        )
    conversations = [messages] if messages and isinstance(messages[0], dict) else messages
    tokenizer, images = client.tokenizer, client.images
    prompts: list[Prompt] = []
    for conversation in conversations:
        kept, parts = take_images(cast("Messages", conversation))
        if parts and images.placeholder is None:
            raise InvalidRequest("the messages have images, but the model takes only texts")
        text = tokenizer.apply_chat_template(
            kept,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=client.chat_template if chat_template is None else chat_template,
            tools=tools,
            image_placeholder=images.placeholder,
            interleaves_images=images.interleaves,
            **(chat_template_kwargs or {}),
        )
        given = {"multi_modal_data": {"image": parts}, "mm_processor_kwargs": mm_processor_kwargs}
        prompts.append({"prompt": text, **given} if parts else text)
    # special tokens are part of the template's text
    asked = {"add_special_tokens": False, **(tokenization_kwargs or {})}
    return completion_prompts(client, prompts, asked) if prompts else []


def _with_settings(prompt: Prompt, settings: Mapping[str, Any]) -> Prompt:
    """A prompt with images, which are processed with these settings where it has none of its own."""
    fields = cast("Mapping[str, Any]", prompt)
    return {**fields, "mm_processor_kwargs": {**settings, **(fields.get("mm_processor_kwargs") or {})}}
