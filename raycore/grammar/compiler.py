"""Compiles `StructuredOutputsParams` to matchers for one model's tokens."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from raycore.errors import InvalidRequest
from raycore.grammar.free_text import FreeText, FreeTexts
from raycore.grammar.matcher import TokenMatcher, reason_of
from raycore.grammar.plain_tags import with_plain_tags
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.tokenizer_files import read_tokenizer_text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

WHITE_SPACE: JsonCompileOptions = {"whitespace_pattern": r"[ \t\n\r]{1,32}"}
"""Allowed white space between the parts of JSON: enough for indentation, but bounded, so that a model can't generate
white space for ever."""
NO_SPACE: JsonCompileOptions = {"whitespace_flexible": False}
_NUM_KEPT = 64
"""Size of the cache of compiled grammars. Many requests have the same grammar."""
_COMPILE_TIMEOUT_S = 30.0
"""A valid grammar compiles in a few seconds at most, including the time to load the tokenizer."""
_REGEX_SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~/")


class _Compiled(NamedTuple):
    """A compiled constraint, and the free text before the constrained part, if any. Both are in their initial state."""

    native: LLMatcher
    free_text: FreeText | None


class GrammarCompiler:
    """Compiles grammars and caches them. Loads the tokenizer and llguidance on first use. Thread-safe.

    Grammars are compiled on one thread, which releases the GIL except while it reads the tokenizer.
    """

    def __init__(self, tokenizer_dir: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the width of the model's logits. The tokenizer may have fewer tokens, or more."""
        self._tokenizer_dir = tokenizer_dir
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raycore-grammars")
        self._tokenizer: LLTokenizer | None = None
        self._free_texts: FreeTexts | None = None
        self._compiled: OrderedDict[bytes, Future[_Compiled | InvalidRequest]] = OrderedDict()

    def prepare(self) -> Future[Any]:
        """Load the tokenizer and llguidance on the compiler's thread. The future raises InvalidRequest on failure."""
        return self._thread.submit(self._load)

    def check(self, asked: StructuredOutputsParams) -> None:
        """Raise InvalidRequest, with the reason, if `asked` can't be compiled."""
        try:
            self.matcher(asked)
        except InvalidRequest as error:
            raise InvalidRequest(f"{asked}: {error}") from error

    def begin(self, asked: StructuredOutputsParams) -> Future[Any]:
        """Start to compile `asked`, unless it is cached. Once the future is done, `matcher` returns or raises without
        waiting."""
        key = msgspec.msgpack.encode(asked)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self._compiled[key] = self._thread.submit(self._try_compiling, asked)
                if len(self._compiled) > _NUM_KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return compiled

    def matcher(self, asked: StructuredOutputsParams, stop_token_ids: Iterable[int] = ()) -> TokenMatcher:
        """Return a new matcher, at the beginning of an output. A complete output ends with an end-of-sequence token or
        one of `stop_token_ids`.

        Raises:
            InvalidRequest: the constraint can't be compiled, wasn't compiled within 30 s, or allows no first token.
        """
        try:
            compiled: _Compiled | InvalidRequest = self.begin(asked).result(_COMPILE_TIMEOUT_S)
        except TimeoutError:
            raise InvalidRequest(
                f"compiling the constraint took longer than {_COMPILE_TIMEOUT_S:g} s: simplify it"
            ) from None
        if isinstance(compiled, InvalidRequest):
            raise InvalidRequest(str(compiled)) from compiled
        return self._begin(compiled, stop_token_ids)

    def _begin(self, compiled: _Compiled, stop_token_ids: Iterable[int] = ()) -> TokenMatcher:
        free_text = None if compiled.free_text is None else compiled.free_text.copy()
        end_ids = [*self._eos_token_ids, *stop_token_ids]
        return TokenMatcher(compiled.native.deep_copy(), self._vocab_size, end_ids, free_text)

    def _try_compiling(self, asked: StructuredOutputsParams) -> _Compiled | InvalidRequest:
        try:
            return self._compile(asked)
        except InvalidRequest as error:
            return error

    def _compile(self, asked: StructuredOutputsParams) -> _Compiled:
        tokenizer = self._load()
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = _grammar_text(asked)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        # verbose error messages would include the parser's state
        limits = LLParserLimits(verbose_errors=False)
        native = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if native.is_error():
            raise InvalidRequest(reason_of(native))
        self._begin(_Compiled(native, None)).allowed_after(np.empty(0, np.int32))
        if asked.after is None:
            return _Compiled(native, None)
        if self._free_texts is None:
            self._free_texts = FreeTexts(tokenizer)
        return _Compiled(native, self._free_texts.before(native, asked.after, asked.or_from))

    def _load(self) -> LLTokenizer:
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        return self._tokenizer

    def _read_tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise InvalidRequest(
                f"the package llguidance is missing ({error}): pip install 'raycore[structured]'"
            ) from error
        if not self._eos_token_ids:
            raise InvalidRequest("the model has no end-of-sequence token: a constrained output could never end")
        try:
            text, num_ids = read_tokenizer_text(Path(self._tokenizer_dir))
            return LLTokenizer(
                with_plain_tags(text, self._eos_token_ids),
                n_vocab=max(self._vocab_size, num_ids),
                eos_token=self._eos_token_ids,
            )
        except (ValueError, OSError) as error:
            raise InvalidRequest(f"the tokenizer in {self._tokenizer_dir} can't be used: {error}") from error


def _grammar_text(asked: StructuredOutputsParams) -> str:
    """The constraint in llguidance's format. Raises ValueError if it can't be converted."""
    from llguidance import LLMatcher, grammar_from

    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        # llguidance limits a grammar's alternatives to some hundreds, but not a regular expression's
        return LLMatcher.grammar_from_regex(pattern_of_choice(asked.choice))
    if asked.grammar is not None:
        return grammar_from("grammar", asked.grammar)
    schema = asked.json if asked.json is not None else {"type": "object"}
    return LLMatcher.grammar_from_json_schema(
        schema, defaults=NO_SPACE if asked.disable_any_whitespace else WHITE_SPACE
    )


def pattern_of_choice(texts: Sequence[str]) -> str:
    """A regular expression that matches these texts and nothing else."""
    return "|".join(map(_literal, texts))


def _literal(text: str) -> str:
    """A regular expression that matches this text and nothing else."""
    return "".join(f"\\{character}" if character in _REGEX_SPECIAL else character for character in text)
