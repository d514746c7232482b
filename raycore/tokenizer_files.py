"""What a checkpoint's tokenizer files hold: the tokenizer itself, and which of its tokens are special.

`tokenizer.json` is the tokenizer. Its special tokens are named in `tokenizer_config.json` and
`special_tokens_map.json`, too, and some only there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as NativeTokenizer

from raycore.errors import InvalidCheckpoint

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerFiles(NamedTuple):
    """What `read_tokenizer_files` gives."""

    native: NativeTokenizer
    """With every special token marked as such; it neither truncates nor pads."""
    named_tokens: dict[str, str]
    """The texts of `bos_token` and its like."""
    config: dict[str, Any]
    """All of `tokenizer_config.json`; empty without that file."""


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read those in the folder `path`.

    Raises:
        InvalidCheckpoint: `tokenizer.json` or another of them is missing or damaged.
    """
    native = _read_native(path / "tokenizer.json")
    config = _read_json(path / "tokenizer_config.json")
    special_map = _read_json(path / "special_tokens_map.json")
    named = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name, special_map.get(name))))}
    extra: object = config.get("additional_special_tokens", special_map.get("additional_special_tokens"))
    _add_special_tokens(
        native, [*named.values(), *_token_texts(extra), *_token_texts(config.get("extra_special_tokens"))]
    )
    return TokenizerFiles(native, named, config)


def _read_native(path: Path) -> NativeTokenizer:
    if not path.is_file():
        raise InvalidCheckpoint(
            f"{path} doesn't exist: raycore reads no other tokenizers. If the checkpoint has a tokenizer.model "
            "instead, convert it: transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        native = NativeTokenizer.from_file(str(path))
    except Exception as error:  # the native library raises nothing more specific
        raise InvalidCheckpoint(f"{path} is not a tokenizer that the tokenizers library can read: {error}") from error
    native.no_truncation()
    native.no_padding()
    return native


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file."""
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InvalidCheckpoint(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidCheckpoint(f"{path} holds a {type(value).__name__}, not an object")
    return cast("dict[str, Any]", value)


def _token_text(token: object) -> str | None:
    """A special token's text from the forms it has in configs: text, or an object with `content`."""
    if isinstance(token, Mapping):
        token = cast("Mapping[str, object]", token).get("content")
    return token if isinstance(token, str) else None


def _token_texts(tokens: object) -> list[str]:
    if isinstance(tokens, Mapping):
        tokens = list(cast("Mapping[str, object]", tokens).values())
    if not isinstance(tokens, list):
        return []
    return [text for token in cast("list[object]", tokens) if (text := _token_text(token))]


def _add_special_tokens(native: NativeTokenizer, texts: Sequence[str]) -> None:
    """Make special those that the config names and `tokenizer.json` doesn't."""
    known = {token.content for token in native.get_added_tokens_decoder().values()}
    missing = [text for text in dict.fromkeys(texts) if text not in known]
    added: list[Any] = [AddedToken(text, special=True, normalized=False) for text in missing]
    native.add_special_tokens(added)  # pyright: ignore[reportUnknownMemberType]  # its stub leaves the list open
