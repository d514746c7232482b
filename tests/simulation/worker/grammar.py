"""Stands in for llguidance in engines that make masks: each constraint is one of some texts, as numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycore.parts.constraints.grammar import compiler
from raycore.parts.constraints.grammar.masks import MaskMaker
from raycore.structured_outputs import StructuredOutputsParams
from simulation.worker.chance import Chance
from simulation.worker.compilations import note_compilation
from simulation.worker.preparation import compile_s
from simulation.worker.sampling import ends_text, next_of_texts, texts_of
from simulation.world.kernel import pause


class Compiler:
    """Stands in for `NativeCompiler`."""

    def __init__(self, tokenizer_dir: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = self.num_tokens = vocab_size
        self._chance = Chance("an engine's constraints")

    def load(self) -> None:
        """There is nothing to load."""

    def compile(self, asked: StructuredOutputsParams) -> Matcher:
        note_compilation(asked)
        self._chance.work(compile_s(self._chance))
        return Matcher(texts_of(asked.choice or []), self._vocab_size)


class Matcher:
    """Stands in for `LLMatcher`."""

    def __init__(self, texts: list[list[int]], vocab_size: int, output: Sequence[int] = ()) -> None:
        self._texts = texts
        self._vocab_size = vocab_size
        self._output = list(output)
        self._error = ""

    def deep_copy(self) -> Matcher:
        return Matcher(self._texts, self._vocab_size, self._output)

    def consume_token(self, token_id: int) -> bool:
        if token_id not in next_of_texts(self._texts, self._output):
            self._error = f"{token_id} may not follow {self._output}"
            return False
        self._output.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self._output), "only what was consumed is taken back"
        del self._output[len(self._output) - num_tokens :]

    def is_accepting(self) -> bool:
        return ends_text(self._texts, self._output)

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error

    def allowed(self) -> NDArray[np.uint8]:
        """A bit for each token that may come next."""
        allowed_V = np.zeros(self._vocab_size, np.bool_)
        allowed_V[next_of_texts(self._texts, self._output)] = True
        return np.packbits(allowed_V, bitorder="little")

    def compute_bitmask(self) -> bytes:
        return self.allowed().tobytes()


def _compute(self: MaskMaker, native: list[tuple[Any, int]], bits_RB: NDArray[np.uint8]) -> None:
    for matcher, row in native:
        pause()  # llguidance lets other threads run
        bits_B = matcher.allowed()
        bits_RB[row, : len(bits_B)] = bits_B


def install() -> None:
    """Let engines compile and follow constraints with this."""
    compiler.NativeCompiler = Compiler  # type: ignore[assignment,misc]
    MaskMaker._compute = _compute  # type: ignore[method-assign]
