"""Endpoints that convert texts and conversations to tokens, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raycore.parts.images.server import has_images
from raycore.server.chat.prompt import prompt_ids
from raycore.server.contract.handlers import answers
from raycore.server.contract.service import Context
from raycore.server.dialects.tokens.response_models import DetokenizedText, TokenizerInfo, Tokens
from raycore.server.http.errors import APIError
from raycore.server.protocol import DetokenizeRequest, TokenizeRequest
from raycore.text.tokenizer_files import read_tokenizer_files


@answers(Tokens, has_images=lambda body: has_images(body.messages))
def tokenize(context: Context, body: TokenizeRequest) -> dict[str, Any]:
    """Tokenize a text or a conversation."""
    context.models.find(body.model)
    engine, tokenizer = context.engine, context.engine.get_tokenizer()
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "give exactly one of prompt and messages", param="prompt")
    if body.messages is not None:
        ids = prompt_ids(engine, context.options, body.messages, body.tools, body, body.chat_template_kwargs or {})
    else:
        assert body.prompt is not None
        ids = tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    strings = [tokenizer.vocabulary_entry(token_id) for token_id in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": strings}


@answers(TokenizerInfo)
def tokenizer_info(context: Context) -> dict[str, Any]:
    """The tokenizer's configuration, with the chat template."""
    config = read_tokenizer_files(Path(context.engine.config.model.tokenizer)).config
    info, template = {"tokenizer_class": "PreTrainedTokenizerFast", **config}, context.options.chat_template
    return info if template is None else {**info, "chat_template": template}


@answers(DetokenizedText)
def detokenize(context: Context, body: DetokenizeRequest) -> dict[str, Any]:
    """Convert token ids to text."""
    context.models.find(body.model)
    tokenizer = context.engine.get_tokenizer()
    unknown = next((token_id for token_id in body.tokens if not 0 <= token_id < tokenizer.vocab_size), None)
    if unknown is not None:
        raise APIError(400, f"tokens contains {unknown}, which isn't in the tokenizer's vocabulary", param="tokens")
    return {"prompt": tokenizer.decode_batch([body.tokens], skip_special_tokens=False)[0]}
