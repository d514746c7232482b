"""A checkpoint's tokenizer with the calls, defaults and results of Hugging Face's `transformers` 5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from raycore.errors import InvalidRequest
from raycore.text.no_tokenizer import NoTokenizer, no_tokenizer
from raycore.text.tokenizer import Tokenizer


class BatchEncoding(dict[str, Any]):
    """Token ids and masks by name: `encoding["input_ids"]`, or `encoding.input_ids`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class HfTokenizer(Tokenizer):
    """A tokenizer for callers who expect one of Hugging Face's. Results are lists: there are no tensors.

    `decode` keeps special tokens by default, and `apply_chat_template` returns token ids and no text.
    """

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> HfTokenizer:
        """The same tokenizer, which shares its memory. Raises InvalidRequest if the engine has none."""
        if isinstance(tokenizer, NoTokenizer):
            raise no_tokenizer("get_tokenizer()")
        made = object.__new__(cls)
        made.__dict__ = tokenizer.__dict__
        return made

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
    ) -> BatchEncoding:
        """Encode one text, or several.

        Args:
            padding: True or `longest`: texts get padding at their ends, up to the length of the longest one.
            truncation: True: texts with more than `max_length` tokens are cut.
            return_tensors: None: results are lists.

        Returns: `input_ids` and `attention_mask`, lists of integers, or lists of such lists for several texts.

        Raises:
            InvalidRequest: an argument isn't supported; the message names it.
        """
        if return_tensors is not None:
            raise InvalidRequest(f"return_tensors={return_tensors!r} isn't supported: results are lists")
        texts = [text] if isinstance(text, str) else list(text)
        most = max_length if truncation not in (False, "do_not_truncate") else None
        if most is None:
            ids = self.encode_batch(texts, add_special_tokens)
        else:
            ids = self.encode_within(texts, most, add_special_tokens)
        masks = [[1] * len(each) for each in ids]
        if padding not in (False, "do_not_pad"):
            self._pad(ids, masks, padding)
        is_one = isinstance(text, str)
        return BatchEncoding(input_ids=ids[0] if is_one else ids, attention_mask=masks[0] if is_one else masks)

    def decode(  # pyright: ignore[reportIncompatibleMethodOverride]  # as Hugging Face's
        self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **_: Any
    ) -> str:
        """Return the text of one id or several."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return super().decode(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False, **_: Any
    ) -> list[str]:
        """Return the text of each sequence of ids."""
        return self.decode_batch(sequences, skip_special_tokens)

    def apply_chat_template(  # pyright: ignore[reportIncompatibleMethodOverride]  # as Hugging Face's
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_tensors: str | None = None,
        **variables: Any,
    ) -> Any:
        """Render a conversation, or several, with a chat template.

        Args:
            chat_template: Jinja text, or the name of one of the checkpoint's templates. None: the default one.
            tokenize: False: return text.
            return_dict: with `tokenize`: return `input_ids` and `attention_mask`. False: return only the ids.
            return_tensors: None: results are lists.
            variables: the template's own variables, such as `enable_thinking`.

        Raises:
            InvalidRequest: there is no template, or it refuses the messages, or an argument isn't supported.
        """
        is_one = not conversation or isinstance(conversation[0], Mapping)
        texts = [
            super(HfTokenizer, self).apply_chat_template(
                each,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tools=tools,
                documents=documents,
                **variables,
            )
            for each in cast("Sequence[Any]", [conversation] if is_one else conversation)
        ]
        given = texts[0] if is_one else texts
        if not tokenize:
            return given
        encoding = self(given, add_special_tokens=False, return_tensors=return_tensors)
        return encoding if return_dict else encoding.input_ids

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text as the vocabulary spells them."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens))

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Return how the vocabulary spells one id or several. None for unknown ids."""
        if isinstance(ids, int):
            return self._native.id_to_token(ids)
        kept = [each for each in ids if not (skip_special_tokens and each in self.special_ids)]
        return [self._native.id_to_token(each) for each in kept]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The ids of one token or several. For unknown ones, the id of the unknown token, or None."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(each) for each in tokens]
        token_id = self._native.token_to_id(tokens)
        return self._unknown_id if token_id is None else token_id

    def get_vocab(self) -> dict[str, int]:
        """All tokens with their ids."""
        return self._native.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the special tokens."""
        return sorted(self.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens, in the order of their ids."""
        return [str(self._native.id_to_token(each)) for each in self.all_special_ids]

    @property
    def bos_token(self) -> str | None:
        """The token at the beginning of a text."""
        return self._named_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token at the end of a text."""
        return self._named_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """The token that makes texts equally long."""
        return self._named_tokens.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        """The token for what the vocabulary doesn't have."""
        return self._named_tokens.get("unk_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id of `pad_token`."""
        return self._named_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        """The id of `unk_token`."""
        return self._named_id("unk_token")

    @property
    def name_or_path(self) -> str:
        """The checkpoint's directory."""
        return str(self._path)

    @property
    def chat_template(self) -> str | None:
        """The default chat template."""
        return self._templates.get("default")

    @property
    def is_fast(self) -> bool:
        """True."""
        return True

    def _pad(self, ids: list[list[int]], masks: list[list[int]], padding: bool | str) -> None:
        pad_id = self.pad_token_id
        if padding not in (True, "longest") or pad_id is None:
            found = "the tokenizer has no pad_token" if pad_id is None else "only True and 'longest' are"
            raise InvalidRequest(f"padding={padding!r} isn't supported: {found}")
        longest = max(map(len, ids), default=0)
        for each, mask in zip(ids, masks, strict=True):
            missing = longest - len(each)
            each += [pad_id] * missing
            mask += [0] * missing
