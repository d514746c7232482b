"""What a checkpoint's tokenizer files hold: the tokenizer itself, and which of its tokens are special.

`tokenizer.json` is the tokenizer. Its special tokens are named in `tokenizer_config.json` and
`special_tokens_map.json`, too, and some only there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
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


class TokenizerText(NamedTuple):
    """What `read_tokenizer_text` gives."""

    json: str
    """What a `tokenizer.json` holds, with every special token in it; it neither truncates nor pads."""
    num_ids: int
    """All tokens' ids are below it."""


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read those in the folder `path`.

    Raises:
        InvalidCheckpoint: `tokenizer.json` or another of them is missing or damaged.
    """
    native = _read_native(path / "tokenizer.json")
    config = _read_json(path / "tokenizer_config.json")
    named, special = _special_texts(path, config)
    _add_special_tokens(native, special)
    return TokenizerFiles(native, named, config)


def read_tokenizer_text(path: Path) -> TokenizerText:
    """The same tokenizer, for another library to make. Ten times as fast where nothing has to be added to the file.

    Raises:
        InvalidCheckpoint: `tokenizer.json` or another of them is missing or damaged.
    """
    found = _read_plain(path)
    if found is not None:
        return found
    native = read_tokenizer_files(path).native
    return TokenizerText(native.to_str(), 1 + max(native.get_vocab(with_added_tokens=True).values()))


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any]


class _TokenizerJson(msgspec.Struct):
    """The parts of a `tokenizer.json` that are looked at here."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    truncation: Any = None
    padding: Any = None


def _read_plain(path: Path) -> TokenizerText | None:
    """The file as it is; None if it can't be taken so."""
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
    """The tokens that have a name, and all that are named special outside of `tokenizer.json`."""
    special_map = _read_json(path / "special_tokens_map.json")
    named = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name, special_map.get(name))))}
    extra: object = config.get("additional_special_tokens", special_map.get("additional_special_tokens"))
    return named, [*named.values(), *_token_texts(extra), *_token_texts(config.get("extra_special_tokens"))]


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
