"""A checkpoint's tokenizer: text to token ids and back, and chat to text. Agrees with Hugging Face's fast tokenizers.

Everything is read from the checkpoint's directory. `tokenizer.json` is the tokenizer itself; `tokenizer_config.json`
and `special_tokens_map.json` name its special tokens. Chat templates are in `tokenizer_config.json` or in files of
their own. Only `tokenizer.json` decides which tokens are added around a text, such as a leading `<s>`: as in
transformers 5, `add_bos_token` and `add_eos_token` are ignored. Older versions of transformers wrote these two settings
for tokenizers without a `tokenizer.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from tokenizers import Tokenizer as NativeTokenizer

from raycore.errors import InvalidRequest
from raycore.text import chat_template as chat_templates
from raycore.text.conversation import Message
from raycore.text.cuts import Side, encode_ends, kept_tokens, span, spans_of_pair, token_starts
from raycore.text.tokenizer_files import read_tokenizer_files

_SENTENCEPIECE_SPACE = "▁"
_BEFORE = ("", "\n", "(")
"""What may come before a word: nothing, or a character that most tokenizers don't merge with the word."""
_CLASSES_WITH_TYPES = {
    f"{name}Tokenizer"
    for name in (
        *("Bert", "ConvBert", "DPRContextEncoder", "DPRQuestionEncoder", "Deberta", "DebertaV2", "Electra", "FNet"),
        *("LayoutLM", "LayoutLMv2", "Lxmert", "MarkupLM", "MobileBert", "SqueezeBert"),
    )
}
"""Hugging Face's classes of tokenizers that give models types of tokens by default. Each has a second name: `Fast`
after the first."""
REPLACEMENT = "\ufffd"
"""Stands in decoded text for bytes that aren't UTF-8, such as a part of a character."""


def _bytes_of_characters() -> dict[str, int]:
    """Return GPT-2's mapping from the characters of a byte-level vocabulary to the bytes that they stand for.

    A printable byte is represented by the character with the same number. The other bytes are represented by the
    characters from U+0100 on, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES_OF_CHARACTERS = _bytes_of_characters()


class TokenPair(NamedTuple):
    """Two texts as one sequence of tokens."""

    token_ids: list[int]
    type_ids: list[int]
    """For each token, which of its two parts the tokenizer says it belongs to: 0 or 1. Many tokenizers say 0 for all.
    """


class Tokenizer:
    """A checkpoint's tokenizer. Create it with `Tokenizer.from_dir`."""

    def __init__(
        self,
        native: NativeTokenizer,
        named_tokens: Mapping[str, str],
        templates: Mapping[str, str],
        path: Path,
        truncation_side: Side = "right",
        *,
        gives_types: bool = True,
    ) -> None:
        """
        Args:
            named_tokens: texts of special tokens by name, such as `bos_token`.
            templates: Jinja text by name.
            gives_types: whether the two texts of a pair have different types of tokens, where `tokenizer.json` has.
        """
        self._native = native
        self._named_tokens = dict(named_tokens)
        self._templates = dict(templates)
        self._path = path
        self.truncation_side: Side = truncation_side
        """Where a text with too many tokens is cut, unless the caller says."""
        self._gives_types = gives_types
        self._texts: dict[int, str] = {}
        self.vocab_size: int = native.get_vocab_size(with_added_tokens=True)
        """Number of tokens of the tokenizer. The model's vocabulary may be larger, because it may be padded."""
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in native.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self._unknown_token: str = named_tokens.get("unk_token") or getattr(native.model, "unk_token", None) or "<unk>"
        self._unknown_id = native.token_to_id(self._unknown_token)

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of the checkpoint in the directory `path`.

        Raises:
            InvalidCheckpoint: `tokenizer.json` is missing, or one of the tokenizer's files is damaged.
        """
        path = Path(path)
        files = read_tokenizer_files(path)
        side: Side = "left" if files.config.get("truncation_side") == "left" else "right"
        templates = _read_templates(path, files.config)
        return cls(files.native, files.named_tokens, templates, path, side, gives_types=_gives_types(files.config))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, by default with special tokens that the tokenizer adds, such as `<s>`."""
        # as a batch of one, because the native `encode` is slower and doesn't release the GIL
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Encode several texts as `encode` does, in one native call, which uses all cores."""
        encodings = self._native.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_within(
        self, texts: Sequence[str], max_tokens: int, add_special_tokens: bool = True, side: Side | None = None
    ) -> list[list[int]]:
        """Encode several texts, each as at most `max_tokens` tokens. What is too long is cut, but keeps the special
        tokens that the tokenizer adds. Of a long text only as much is encoded as that takes.

        Args:
            side: where texts are cut. None: `truncation_side`.
        """
        num_added = self._native.num_special_tokens_to_add(False) if add_special_tokens else 0
        room, side = max(0, max_tokens - num_added), side or self.truncation_side
        encodings = encode_ends(self._native, texts, room, side, add_special_tokens=add_special_tokens)
        encoded: list[list[int]] = []
        for encoding in encodings:
            ids = encoding.ids
            if len(ids) > max_tokens:
                # of a tokenizer whose special tokens alone are too many, some are left out, too
                kept = kept_tokens(encoding, span(len(ids) - num_added, room, side))[:max_tokens]
                ids = [ids[index] for index in kept]
            encoded.append(ids)
        return encoded

    def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        max_tokens: int | None = None,
        side: Side | None = None,
        max_tokens_each: tuple[int | None, int | None] = (None, None),
    ) -> Iterator[TokenPair]:
        """Encode pairs of texts as the tokenizer joins them: often with a separator between the texts.

        Each distinct text is encoded once. A pair is joined when it is asked for, so that a long text of many pairs
        takes memory only for the pairs that the caller keeps.

        Args:
            max_tokens: how many tokens a pair may have, with special tokens. Of the longer text, more is left out.
            side: where texts are cut. None: `truncation_side`.
            max_tokens_each: how many tokens the first and the second text may have. They are cut at their ends.
        """
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        encoded = dict(zip(texts, self.encode_batch(texts, add_special_tokens=False), strict=True))
        room = None if max_tokens is None else max(0, max_tokens - self._native.num_special_tokens_to_add(True))
        parts = self._parts_of_pairs(min((text for text in texts if encoded[text]), key=len, default=""))
        for pair in pairs:
            both = [encoded[text] for text in pair]
            counts = len(both[0]), len(both[1])
            spans = spans_of_pair(counts, room, side or self.truncation_side, max_tokens_each)
            kept = [ids[part.start : part.stop] for ids, part in zip(both, spans, strict=True)]
            token_ids: list[int] = []
            type_ids: list[int] = []
            for origin, added, type_id in parts:
                ids = added if origin is None else kept[origin]
                token_ids += ids
                type_ids += [type_id] * len(ids)
            yield TokenPair(token_ids[:max_tokens], type_ids[:max_tokens])

    def _parts_of_pairs(self, text: str) -> list[tuple[int | None, list[int], int]]:
        """What the tokenizer makes a pair of, in order: one of its two texts, or added tokens; and their type.

        Args:
            text: has tokens, if any text of the pairs has. What surrounds texts doesn't depend on them.
        """
        (encoding,) = self._native.encode_batch_fast([(text, text)])
        types = encoding.type_ids if self._gives_types else [0] * len(encoding)
        tokens = zip(encoding.sequence_ids, types, encoding.ids, strict=True)
        return [
            (origin, [token_id for *_, token_id in part], type_id)
            for (origin, type_id), part in groupby(tokens, key=lambda token: token[:2])
        ]

    def cut(self, text: str, max_tokens: int) -> str:
        """The beginning of `text` that has at most `max_tokens` tokens, without special tokens."""
        while len(encoding := self._native.encode_batch([text], add_special_tokens=False)[0]) > max_tokens:
            # the beginning of a text may have other tokens than the text begins with, so this may take several turns
            start = next(islice(token_starts(encoding), max_tokens, None))
            text = text[: min(start, len(text) - 1)]
        return text

    def token_starts(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """For each token of `encode(text)`, the position in the text at which it begins: see `cuts.token_starts`."""
        (encoding,) = self._native.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(token_starts(encoding))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of the ids. Ids without a text are skipped; bytes that aren't UTF-8 become U+FFFD."""
        return self._native.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_batch(self, batch: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """Decode several sequences as `decode` does, in one native call, which releases the GIL."""
        return self._native.decode_batch([list(ids) for ids in batch], skip_special_tokens=skip_special_tokens)

    @cached_property
    def has_byte_fallback(self) -> bool:
        """Whether the vocabulary has tokens for single bytes such as `<0x0A>`, as SentencePiece writes them."""
        return self._native.token_to_id("<0x0A>") is not None

    def token_text(self, token_id: int) -> str:
        """Return one token's text as it is in the middle of a text, also of a special token. Empty for unknown ids."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._make_token_text(token_id)
        return text

    def vocabulary_entry(self, token_id: int) -> str:
        """Return how the vocabulary spells one token, such as `Ġthe`. Empty for unknown ids."""
        return self._native.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the UTF-8 bytes that one token adds to a text, even if they are only a part of a character.

        `token_text` returns U+FFFD for such a part. Returns None if the tokenizer doesn't tell which bytes the token
        stands for.
        """
        text = self.token_text(token_id)
        piece = self._native.id_to_token(token_id) or ""
        if REPLACEMENT not in text or piece.replace(_SENTENCEPIECE_SPACE, " ") == text:
            return text.encode()
        if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
            return bytes.fromhex(piece[3:5])
        spelled = bytes(_BYTES_OF_CHARACTERS.get(character, 0) for character in piece)
        return spelled if spelled.decode(errors="replace") == text else None

    def bad_words_token_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Return the tokens of the words: at the beginning of a text and inside, each with and without a space before.

        White space at a word's beginning is ignored. A sequence that ends with another one is left out: it can't occur
        where the other one is forbidden.

        Raises:
            InvalidRequest: a word has no tokens, or only the unknown token for a part of it.
        """
        return [spelling for word in words for spelling in self._spellings(word)]

    def _spellings(self, word: str) -> list[list[int]]:
        bare = word.lstrip() or word
        texts = [before + space + bare for before in _BEFORE for space in ("", " ")]
        encoded = self.encode_batch([*_BEFORE, *texts], add_special_tokens=False)
        # a context's tokens, twice: for the word without a space and with one
        contexts = [ids for ids in encoded[: len(_BEFORE)] for _ in range(2)]
        found = [
            ids[len(context) :]
            for context, ids in zip(contexts, encoded[len(_BEFORE) :], strict=True)
            if len(ids) > len(context) and ids[: len(context)] == context
        ]
        if not found:
            raise InvalidRequest(f"bad_words contains {word!r}, for which the tokenizer has no tokens")
        known = [ids for ids in found if self._unknown_id not in ids or bare == self._unknown_token]
        if not known:
            raise InvalidRequest(
                f"bad_words contains {word!r}, for a part of which the tokenizer has only its unknown token "
                f"{self._unknown_token!r}: a model can't generate the word"
            )
        spellings: list[list[int]] = []
        for ids in sorted(known, key=len):
            if not any(ids[-len(shorter) :] == shorter for shorter in spellings):
                spellings.append(ids)
        return spellings

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        image_placeholder: str | None = None,
        interleaves_images: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render the conversation as a prompt, with a chat template. Encode the prompt with `add_special_tokens=False`.

        Messages are normalized first (`raycore.text.conversation`).

        Args:
            chat_template: Jinja text, or the name of one of the checkpoint's templates. None: the checkpoint's default.
            image_placeholder: what stands for an image in a text, for messages with images.
            interleaves_images: see `chat_template.render`.
            kwargs: the template's own variables, such as `enable_thinking`.

        Raises:
            InvalidRequest: the checkpoint has no default template, or the template refuses the messages.
        """
        return chat_templates.render(
            self._find_template(chat_template, has_tools=tools is not None),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=self._named_tokens,
            variables={"tools": tools, "documents": None, **kwargs},
            placeholder=image_placeholder,
            interleaves=interleaves_images,
        )

    def _find_template(self, asked: str | None, has_tools: bool) -> str:
        if asked is not None:
            return self._templates.get(asked, asked)
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self._templates:
                return self._templates[name]
        found = f"only templates named {', '.join(sorted(self._templates))}" if self._templates else "none"
        raise InvalidRequest(
            f"the tokenizer in {self._path} has no default chat template (found: {found}): "
            "pass chat_template=..., or give a prompt instead of messages"
        )

    def _named_id(self, name: str) -> int | None:
        token = self._named_tokens.get(name)
        return None if token is None else self._native.token_to_id(token)

    def _make_token_text(self, token_id: int) -> str:
        piece = self._native.id_to_token(token_id)
        if piece is None:
            return ""
        text = self.decode([token_id], skip_special_tokens=False)
        # SentencePiece decoders drop the leading space of a text
        return " " + text if piece.startswith(_SENTENCEPIECE_SPACE) and not text.startswith(" ") else text


def _gives_types(config: Mapping[str, Any]) -> bool:
    """Whether Hugging Face's tokenizer gives models types of tokens: its `model_input_names` say it, and without them
    its class. Without both, `tokenizer.json` decides: old checkpoints of BERT name no class."""
    names: object = config.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    name: object = config.get("tokenizer_class")
    return not isinstance(name, str) or name.removesuffix("Fast") in _CLASSES_WITH_TYPES


def _read_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the checkpoint's chat templates by name. Template files override `tokenizer_config.json`."""
    templates: dict[str, str] = {}
    given: Any = config.get("chat_template")
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        named = cast("list[dict[str, str]]", given)
        templates.update({entry["name"]: entry["template"] for entry in named if {"name", "template"} <= entry.keys()})
    files = {file.stem: file for file in (path / "additional_chat_templates").glob("*.jinja")}
    if (path / "chat_template.jinja").is_file():
        files["default"] = path / "chat_template.jinja"
    templates.update({name: file.read_text(encoding="utf-8") for name, file in files.items()})
    return templates
