"""Reads a checkpoint's tokenizer files, or the tokenizer in a GGUF file, and which of its tokens are special.

`tokenizer.json` is the tokenizer. `tokenizer_config.json` and `special_tokens_map.json` name special tokens, too. Some
of those may be missing in `tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as NativeTokenizer

from raycore.checkpoint.gguf.header import is_gguf, read_gguf
from raycore.errors import InvalidCheckpoint
from raycore.json_fields import refuse_lfs_pointer
from raycore.text.gguf_tokenizer import tokenizer_config, tokenizer_json

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerFiles(NamedTuple):
    """The result of `read_tokenizer_files`."""

    native: NativeTokenizer
    """The tokenizer. All special tokens are marked as special. Truncation and padding are off."""
    named_tokens: dict[str, str]
    """Texts of the special tokens by name, such as `bos_token`."""
    config: dict[str, Any]
    """The contents of `tokenizer_config.json`; empty without that file."""


class TokenizerText(NamedTuple):
    """The result of `read_tokenizer_text`."""

    json: str
    """The contents of a `tokenizer.json` with all special tokens, and without truncation and padding."""
    num_ids: int
    """One more than the largest token id."""


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read the tokenizer files in the directory `path`.

    Raises:
        InvalidCheckpoint: `tokenizer.json` is missing, or one of the tokenizer files is damaged.
    """
    if is_gguf(path):
        return _read_gguf_tokenizer(path)
    native = _read_native(path / "tokenizer.json")
    config = _read_json(path / "tokenizer_config.json")
    named, special = _special_texts(path, config)
    _add_special_tokens(native, special)
    return TokenizerFiles(native, named, config)


def read_eos_token_id(path: Path) -> int | None:
    """Return the id of the tokenizer's `eos_token`. None if the directory `path` has no tokenizer, or it names none.

    Reads the whole tokenizer only if `tokenizer.json` doesn't list the token among the added ones.

    Raises:
        InvalidCheckpoint: one of the tokenizer files is damaged.
    """
    if is_gguf(path):
        return None  # its config.json has the token
    if not (path / "tokenizer.json").is_file():
        return None
    named, _ = _special_texts(path, _read_json(path / "tokenizer_config.json"))
    text = named.get("eos_token")
    if text is None:
        return None
    try:
        added = msgspec.json.decode((path / "tokenizer.json").read_bytes(), type=_AddedTokens).added_tokens
    except (OSError, ValueError):
        added = []  # reading the whole tokenizer names the mistake
    known = next((token.id for token in added if token.content == text), None)
    return read_tokenizer_files(path).native.token_to_id(text) if known is None else known


def read_named_token(path: Path, name: str) -> str | None:
    """Return the text of a special token, such as `mask_token`. None: `tokenizer_config.json` and
    `special_tokens_map.json` in the directory `path` don't name it.

    Raises:
        InvalidCheckpoint: one of these files is damaged.
    """
    return None if is_gguf(path) else _special_texts(path, _read_json(path / "tokenizer_config.json"))[0].get(name)


def read_tokenizer_text(path: Path) -> TokenizerText:
    """Return the tokenizer of the checkpoint directory `path` as JSON text, for another library.

    If `tokenizer.json` needs no changes, it is returned as it is. Otherwise this takes ten times as long, because the
    tokenizer must be loaded and written as JSON again.

    Raises:
        InvalidCheckpoint: `tokenizer.json` is missing, or one of the tokenizer files is damaged.
    """
    found = _read_plain(path)
    if found is not None:
        return found
    native = read_tokenizer_files(path).native
    return TokenizerText(native.to_str(), 1 + max(native.get_vocab(with_added_tokens=True).values()))


def _read_gguf_tokenizer(path: Path) -> TokenizerFiles:
    file = read_gguf(path)
    try:
        native = NativeTokenizer.from_str(json.dumps(tokenizer_json(file)))
    except InvalidCheckpoint:
        raise
    except Exception as error:  # the native library raises nothing more specific
        raise InvalidCheckpoint(f"{path} has a tokenizer that the tokenizers library can't read: {error}") from error
    config = tokenizer_config(file)
    return TokenizerFiles(native, {name: config[name] for name in _NAMED_TOKENS if name in config}, config)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    """The field of a `tokenizer.json` that `read_eos_token_id` needs."""

    added_tokens: list[_AddedToken] = []


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any]


class _TokenizerJson(msgspec.Struct):
    """The fields of a `tokenizer.json` that `_read_plain` needs."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    truncation: Any = None
    padding: Any = None


def _read_plain(path: Path) -> TokenizerText | None:
    """Return the contents of `tokenizer.json` as they are, or None if they can't be used without changes."""
    try:
        text = (path / "tokenizer.json").read_text(encoding="utf-8")
        parts = msgspec.json.decode(text, type=_TokenizerJson)
    except (OSError, ValueError):
        return None
    _, special = _special_texts(path, _read_json(path / "tokenizer_config.json"))
    if parts.truncation or parts.padding or not {token.content for token in parts.added_tokens}.issuperset(special):
        return None
    vocab = parts.model.vocab
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return TokenizerText(text, 1 + max([*ids, *(token.id for token in parts.added_tokens)]))


def _special_texts(path: Path, config: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the texts of the named tokens, and all texts that files beside `tokenizer.json` declare as special."""
    special_map = _read_json(path / "special_tokens_map.json")
    named = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name, special_map.get(name))))}
    extra: object = config.get("additional_special_tokens", special_map.get("additional_special_tokens"))
    return named, [*named.values(), *_token_texts(extra), *_token_texts(config.get("extra_special_tokens"))]


def _read_native(path: Path) -> NativeTokenizer:
    if not path.parent.is_dir():
        raise InvalidCheckpoint(
            f"tokenizer: {path.parent} isn't a directory: give one with a tokenizer.json, or the name of a checkpoint "
            "on the hub"
        )
    if not path.is_file():
        raise InvalidCheckpoint(
            f"{path} doesn't exist; it is the only tokenizer format that raycore reads. If the checkpoint has a "
            "tokenizer.model, convert it: transformers.AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        native = NativeTokenizer.from_file(str(path))
    except Exception as error:  # the native library raises nothing more specific
        refuse_lfs_pointer(path, path.read_bytes())
        raise InvalidCheckpoint(
            f"{path} isn't a tokenizer that the tokenizers library can read: {error}. Download it again, or update the "
            "package tokenizers"
        ) from error
    native.no_truncation()
    native.no_padding()
    return native


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty object if there is no such file."""
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InvalidCheckpoint(f"{path} isn't valid JSON: {error}. Correct it, or download it again") from error
    if not isinstance(value, dict):
        raise InvalidCheckpoint(f"{path} holds a {type(value).__name__}, not a JSON object")
    return cast("dict[str, Any]", value)


def _token_text(token: object) -> str | None:
    """Return a special token's text. In a file, a token is either its text or an object with `content`."""
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
    """Add `texts` to the tokenizer as special tokens, except those that are added tokens already."""
    known = {token.content for token in native.get_added_tokens_decoder().values()}
    missing = [text for text in dict.fromkeys(texts) if text not in known]
    added: list[Any] = [AddedToken(text, special=True, normalized=False) for text in missing]
    native.add_special_tokens(added)  # pyright: ignore[reportUnknownMemberType]  # its stub leaves the list open
