"""Compiles the grammars of waiting requests on background threads while steps run. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from raycore.config import ModelConfig
from raycore.errors import InvalidConfig, InvalidRequest
from raycore.grammar.compiler import GrammarCompiler
from raycore.structured_outputs import StructuredOutputsParams


class GrammarPreparation:
    """The grammars that requests will need."""

    def __init__(self, model: ModelConfig) -> None:
        self.compiler = GrammarCompiler(model.tokenizer, model.spec.vocab_size, model.spec.eos_token_ids)
        self._under_way: dict[int, Future[Any]] = {}
        """Futures of grammars that are being compiled, by the seq_id of the waiting request."""
        self._loading: Future[Any] | None = None

    def begin_loading(self) -> None:
        """Start to load the tokenizer and llguidance, which the first grammar needs otherwise."""
        self._loading = self.compiler.prepare()

    def finish_loading(self, timeout_s: float) -> None:
        """Wait for what `begin_loading` has begun, if anything.

        Raises:
            InvalidConfig: it could not be loaded.
        """
        if self._loading is None:
            return
        try:
            self._loading.result(timeout_s)
        except InvalidRequest as error:
            raise InvalidConfig(f"prepare_structured_outputs=True: {error}") from error

    def prepare(self, asked: Mapping[int, StructuredOutputsParams], dropped: Sequence[int]) -> list[int]:
        """Start to compile what is `asked` for, by seq_id, but not what only `dropped` ones need.

        Returns the seq_ids whose grammars are still being compiled.
        """
        unneeded = [self._under_way.pop(seq_id, None) for seq_id in dropped]
        self._under_way |= {seq_id: self.compiler.begin(each) for seq_id, each in asked.items()}
        for future in unneeded:
            # other requests may have the same constraint
            if future is not None and future not in self._under_way.values():
                self.compiler.cancel(future)
        for seq_id in [seq_id for seq_id, future in self._under_way.items() if future.done()]:
            del self._under_way[seq_id]
        return list(self._under_way)
