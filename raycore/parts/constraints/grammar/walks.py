"""Tries a compiled constraint before a request may have it: follows outputs that it allows, at random.

llguidance compiles parts of a grammar when an output gets there. What it can't follow then would end a request whose
beginning the client already has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar.native import NativeCompiler, reason_of
from raycore.structured_outputs import StructuredOutputsParams
from raycore.system import random, time

if TYPE_CHECKING:
    from llguidance import LLMatcher

_NUM_WALKS = 3
_NUM_TOKENS = 64
_MAX_S = 0.3
"""Maximum time of all walks of a constraint, in seconds of a processor."""
_CLOSING = ('"', "}", "]", ",", ":", '",', '":', '"}')
"""Texts that end a part of JSON. Without a preference for them, a walk would get no further than its first string."""


def checker(
    tokenizer_dir: str, vocab_size: int, eos_token_ids: Sequence[int]
) -> Callable[[StructuredOutputsParams], None]:
    """A function that raises InvalidRequest if a constraint can't be compiled or followed."""
    compiler = NativeCompiler(tokenizer_dir, vocab_size, eos_token_ids)
    closing_ids: list[int] = []
    with suppress(InvalidRequest):  # each check raises it again
        tokenizer = compiler.load()
        closing_ids = [ids[0] for text in _CLOSING if len(ids := tokenizer.tokenize_str(text)) == 1]

    def check(asked: StructuredOutputsParams) -> None:
        native = compiler.compile(asked)
        stop_s = time.thread_time() + _MAX_S
        for seed in range(_NUM_WALKS):
            _walk(native.deep_copy(), vocab_size, closing_ids, random.Random(seed), stop_s)

    return check


def _walk(native: LLMatcher, vocab_size: int, closing_ids: Sequence[int], rng: random.Random, stop_s: float) -> None:
    """Follow one output. Raises InvalidRequest if that fails."""
    for num_tokens in range(_NUM_TOKENS):
        # as one number, whose bit i is for token i
        allowed = int.from_bytes(native.compute_bitmask(), "little") & ((1 << vocab_size) - 1)
        if native.is_error():
            raise InvalidRequest(f"can't be enforced at token {num_tokens + 1} of an output: {reason_of(native)}")
        if not (allowed or num_tokens or native.is_accepting()):
            raise InvalidRequest("it allows none of the model's tokens at the beginning of the output")
        if not allowed or native.is_stopped() or time.thread_time() > stop_s:
            return
        if not native.consume_token(_pick(allowed, vocab_size, closing_ids, rng)):
            raise InvalidRequest(f"can't be enforced at token {num_tokens + 1} of an output: {reason_of(native)}")


def _pick(allowed: int, vocab_size: int, closing_ids: Sequence[int], rng: random.Random) -> int:
    """One of the allowed tokens, often one that closes something."""
    closing = [token_id for token_id in closing_ids if allowed >> token_id & 1]
    if closing and rng.random() < 0.5:
        return rng.choice(closing)
    above = allowed >> (start := rng.randrange(vocab_size)) << start
    found = above or allowed
    return (found & -found).bit_length() - 1
