"""Compiles a constraint with llguidance, in the same way wherever it is compiled.

A constraint is compiled in the process that checks it (`gate_process.py`) and then by the workers. Both call
`NativeCompiler.compile`, so that what has been checked is what the workers compile: the same text and the same limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raycore.errors import InvalidRequest
from raycore.extras import needing
from raycore.parts.constraints.grammar.embedded import with_enforceable_schemas
from raycore.parts.constraints.grammar.lark import NO_SPACE, WHITE_SPACE, pattern_of_choice
from raycore.parts.constraints.grammar.plain_tags import special_tokens, with_plain_tags
from raycore.parts.constraints.grammar.schema import enforceable, parse_schema
from raycore.parts.constraints.grammar.structural_tag import structural_tag_grammar
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.tokenizer_files import read_tokenizer_text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_LEXER_STATES = 50_000
"""Bounds the memory of one grammar: a state takes 1 to 2 KB, and a hostile pattern creates them as fast as it can."""


class NativeCompiler:
    """Compiles constraints for one model's tokens. Loads the tokenizer and llguidance on first use."""

    def __init__(self, tokenizer_dir: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the width of the model's logits. The tokenizer may have fewer tokens, or more."""
        self._tokenizer_dir = tokenizer_dir
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._special: dict[str, int] = {}
        """The tokens that llguidance treats as special, by their texts."""
        self.num_tokens = vocab_size
        """Of the tokenizer, once it is loaded: how many tokens native masks have. Not less than `vocab_size`."""

    def compile(self, asked: StructuredOutputsParams) -> LLMatcher:
        """Return a matcher at the beginning of an output. Raises InvalidRequest, with the reason, if there is none."""
        tokenizer = self.load()
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = self._grammar_text(asked)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        # verbose error messages would include the parser's state
        limits = LLParserLimits(verbose_errors=False, max_lexer_states=_MAX_LEXER_STATES)
        native = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if native.is_error():
            raise InvalidRequest(reason_of(native))
        return native

    def load(self) -> LLTokenizer:
        """The tokenizer. Raises InvalidRequest if it, or llguidance, can't be used."""
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        return self._tokenizer

    def _read_tokenizer(self) -> LLTokenizer:
        with needing("constrained outputs need", "structured", InvalidRequest):
            from llguidance import LLTokenizer
        if not self._eos_token_ids:
            raise InvalidRequest("the model has no end-of-sequence token: a constrained output could never end")
        try:
            text, num_ids = read_tokenizer_text(Path(self._tokenizer_dir))
            text = with_plain_tags(text, self._eos_token_ids)
            self._special = special_tokens(text)
            self.num_tokens = max(self._vocab_size, num_ids)
            return LLTokenizer(
                text,
                n_vocab=self.num_tokens,
                eos_token=self._eos_token_ids,
            )
        except (ValueError, OSError) as error:
            raise InvalidRequest(f"the tokenizer in {self._tokenizer_dir} can't be used: {error}") from error

    def _grammar_text(self, asked: StructuredOutputsParams) -> str:
        """The constraint in llguidance's format. Raises ValueError if it can't be converted."""
        if asked.structural_tag is None:
            return _grammar_text(asked)
        space = NO_SPACE if asked.disable_any_whitespace else WHITE_SPACE
        return structural_tag_grammar(str(asked.structural_tag), self._special, space)


def reason_of(native: LLMatcher) -> str:
    """llguidance's error message, without its placeholder for omitted details and without the trace of a panic."""
    message = native.get_error().partition("\n<backtrace>")[0].removesuffix("<non-verbose/>").rstrip()
    if "coerce_one_of" in message:
        return "oneOf: the compiler can't tell that no value matches two of the alternatives: use anyOf"
    # after the first line, it draws where the problem is, which the first one says by line and column
    first, *others = message.splitlines()
    problem = next((line.removeprefix("error: ") for line in others if line.startswith("error: ")), None)
    return first if problem is None else f"{first.rstrip(':')}: {problem}"


def _grammar_text(asked: StructuredOutputsParams) -> str:
    """The constraint in llguidance's format. Raises ValueError if it can't be converted."""
    from llguidance import LLMatcher, grammar_from

    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        # llguidance limits a grammar's alternatives to some hundreds, but not a regular expression's
        return LLMatcher.grammar_from_regex(pattern_of_choice(asked.choice))
    if asked.grammar is not None:
        return grammar_from("grammar", with_enforceable_schemas(asked.grammar))
    schema = {"type": "object"} if asked.json is None else enforceable(parse_schema(str(asked.json)))
    return LLMatcher.grammar_from_json_schema(
        schema, defaults=NO_SPACE if asked.disable_any_whitespace else WHITE_SPACE
    )
