"""Grammars that waiting requests will need, compiled on background threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raycore.errors import InvalidConfig, InvalidRequest
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.structured_outputs import StructuredOutputsParams
from raycore.system import Future


class PreparedGrammars:
    """The grammars that one compiler has been asked for, and hasn't compiled yet."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._under_way: dict[int, Future[Any]] = {}
        """Futures of grammars that are being compiled, by the seq_id of the waiting request."""

    def prepare(self, asked: Mapping[int, StructuredOutputsParams], dropped: Sequence[int] = ()) -> list[int]:
        """Start to compile grammars of waiting requests in the background.

        Args:
            asked: constraints by seq_id.
            dropped: seq_ids of earlier calls whose requests have left.

        Returns:
            The seq_ids whose grammars are still being compiled, from this call and earlier ones.
            A grammar that cannot be compiled counts as done: the step that starts its request reports the error.
        """
        unneeded = [self._under_way.pop(seq_id, None) for seq_id in dropped]
        self._under_way |= {seq_id: self._compiler.begin(each) for seq_id, each in asked.items()}
        for future in unneeded:
            # other requests may have the same constraint
            if future is not None and future not in self._under_way.values():
                self._compiler.cancel(future)
        for seq_id in [seq_id for seq_id, future in self._under_way.items() if future.done()]:
            del self._under_way[seq_id]
        return list(self._under_way)


def wait_until_loaded(loading: Future[Any], timeout_s: float) -> None:
    """Wait for what `prepare_structured_outputs` loads: see `GrammarCompiler.prepare`.

    Raises:
        InvalidConfig: it could not be loaded.
    """
    try:
        loading.result(timeout_s)
    except InvalidRequest as error:
        raise InvalidConfig(f"prepare_structured_outputs=True: {error}") from error
