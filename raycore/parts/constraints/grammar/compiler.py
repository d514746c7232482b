"""Compiles `StructuredOutputsParams` to matchers for one model's tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from raycore.errors import InvalidRequest
from raycore.parts.constraints.grammar.free_text import FreeText, FreeTexts
from raycore.parts.constraints.grammar.matcher import TokenMatcher
from raycore.parts.constraints.grammar.native import NativeCompiler
from raycore.structured_outputs import StructuredOutputsParams
from raycore.system import (
    Future,
    ThreadPoolExecutor,
    futures,
    threading,
    time,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")

STACK_BYTES = 16 << 20
"""The stack of a thread that compiles. More than where constraints are checked: what passed there must pass here."""
_NUM_THREADS = 4
"""A constraint that takes seconds doesn't delay the others."""
_NUM_KEPT = 64
"""Size of the cache of compiled grammars. Many requests have the same grammar."""
_COMPILE_TIMEOUT_S = 10.0
"""How long a step waits, in seconds, if a grammar isn't ready. Then its request fails, because all others wait, too."""


class _Compiled(NamedTuple):
    """A compiled constraint, and the free text before the constrained part, if any. Both are in their initial state."""

    native: LLMatcher
    free_text: FreeText | None


class GrammarCompiler:
    """Compiles grammars and caches them. Loads the tokenizer and llguidance on first use. Thread-safe.

    Grammars are compiled on threads, which release the GIL except while they read the tokenizer or a schema. A
    constraint that nobody has checked can crash the process: see `parts/constraints/grammar/gate.py`.
    """

    def __init__(self, tokenizer_dir: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the width of the model's logits. The tokenizer may have fewer tokens, or more."""
        self._native = NativeCompiler(tokenizer_dir, vocab_size, eos_token_ids)
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="raycore-grammars")
        self._free_texts: FreeTexts | None = None
        self._compiled: OrderedDict[bytes, tuple[Future[_Compiled | InvalidRequest], float]] = OrderedDict()
        """What has been compiled, or is going to be, and when that was asked for (`time.monotonic()`)."""

    def prepare(self) -> Future[Any]:
        """Load the tokenizer and llguidance on a thread. The future raises InvalidRequest on failure."""
        return self._submit(self._load)

    def begin(self, asked: StructuredOutputsParams) -> Future[Any]:
        """Start to compile `asked`, unless it is cached. Once the future is done, `matcher` returns or raises without
        waiting."""
        return self._begun(asked)[0]

    def cancel(self, begun: Future[Any]) -> None:
        """Don't compile what `begin` has begun, unless a thread already does: that can't be interrupted.

        Nobody may wait for the future.
        """
        with self._lock:
            if begun.cancel():
                for key in [key for key, (future, _) in self._compiled.items() if future is begun]:
                    del self._compiled[key]

    def matcher(self, asked: StructuredOutputsParams, stop_token_ids: Iterable[int] = ()) -> TokenMatcher:
        """Return a new matcher, at the beginning of an output. A complete output ends with an end-of-sequence token or
        one of `stop_token_ids`.

        Raises:
            InvalidRequest: the constraint can't be compiled, wasn't compiled within 10 s, or allows no first token.
        """
        future, begun_s = self._begun(asked)
        try:
            # counted from when the compilation was asked for, because the other requests of the step wait, too
            compiled = future.result(max(0.0, begun_s + _COMPILE_TIMEOUT_S - time.monotonic()))
        except futures.TimeoutError:  # in Python 3.10 not yet the built-in one
            raise InvalidRequest(
                f"compiling the constraint took longer than {_COMPILE_TIMEOUT_S:g} s: simplify it"
            ) from None
        if isinstance(compiled, InvalidRequest):
            raise InvalidRequest(str(compiled)) from compiled
        return self._begin(compiled, stop_token_ids)

    def matcher_of(self, asked: StructuredOutputsParams, stop_token_ids: Iterable[int] = ()) -> TokenMatcher:
        """Do the same as `matcher`. The error says which parameter can't be followed."""
        try:
            return self.matcher(asked, stop_token_ids)
        except InvalidRequest as error:
            why = str(error)
            raise InvalidRequest(
                why if why.startswith("structured_outputs") else f"structured_outputs: {why}"
            ) from error

    def _begun(self, asked: StructuredOutputsParams) -> tuple[Future[_Compiled | InvalidRequest], float]:
        key = msgspec.msgpack.encode(asked)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self._compiled[key] = self._submit(self._try_compiling, asked), time.monotonic()
                if len(self._compiled) > _NUM_KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return compiled

    def _submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        # a thread gets its stack when it starts, and the pool starts threads as they are needed
        before = threading.stack_size(STACK_BYTES)
        try:
            return self._threads.submit(work, *args)
        finally:
            threading.stack_size(before)

    def _begin(self, compiled: _Compiled, stop_token_ids: Iterable[int] = ()) -> TokenMatcher:
        free_text = None if compiled.free_text is None else compiled.free_text.copy()
        end_ids = [*self._eos_token_ids, *stop_token_ids]
        native = compiled.native.deep_copy()
        return TokenMatcher(native, self._vocab_size, end_ids, free_text, num_native=self._native.num_tokens)

    def _try_compiling(self, asked: StructuredOutputsParams) -> _Compiled | InvalidRequest:
        try:
            return self._compile(asked)
        except InvalidRequest as error:
            return error

    def _compile(self, asked: StructuredOutputsParams) -> _Compiled:
        self._load()
        native = self._native.compile(asked)
        self._begin(_Compiled(native, None)).allowed_after(np.empty(0, np.int32))
        if asked.after is None:
            return _Compiled(native, None)
        with self._loading:
            if self._free_texts is None:
                self._free_texts = FreeTexts(self._native.load())
            return _Compiled(native, self._free_texts.before(native, asked.after, asked.or_from))

    def _load(self) -> None:
        with self._loading:
            self._native.load()
