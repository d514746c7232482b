"""Compiles the grammars of waiting requests on background threads while steps run. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from raycore.errors import InvalidConfig, InvalidRequest
from raycore.structured_outputs import StructuredOutputsParams
from raycore.worker.part import WorkerPart, called_by_name

if TYPE_CHECKING:
    from raycore.worker.core import WorkerCore


class GrammarPreparation(WorkerPart):
    """The grammars that requests will need. Only the last stage needs any."""

    def __init__(self, core: WorkerCore) -> None:
        super().__init__(core)
        self._under_way: dict[int, Future[Any]] = {}
        """Futures of grammars that are being compiled, by the seq_id of the waiting request."""
        self._loading: list[Future[Any]] = []
        """What the first grammar needs: the tokenizer and llguidance."""
        if core.config.model.prepare_structured_outputs and core.rank.is_last_stage:
            self._loading.append(core.grammars.prepare())

    def warmed_up(self) -> None:
        """Wait for what is being loaded.

        Raises:
            InvalidConfig: it could not be loaded.
        """
        for loading in self._loading:
            try:
                loading.result(self.core.config.executor.init_timeout_s)
            except InvalidRequest as error:
                raise InvalidConfig(f"prepare_structured_outputs=True: {error}") from error

    @called_by_name
    def prepare_grammars(self, asked: Mapping[int, StructuredOutputsParams], dropped: Sequence[int] = ()) -> list[int]:
        """Start to compile grammars of waiting requests in the background. Only the last stage needs grammars.

        Args:
            asked: constraints by seq_id.
            dropped: seq_ids of earlier calls whose requests have left.

        Returns:
            The seq_ids whose grammars are still being compiled, from this call and earlier ones.
            A grammar that cannot be compiled counts as done: the step that starts its request reports the error.
        """
        if not self.core.rank.is_last_stage:
            return []
        compiler = self.core.grammars
        unneeded = [self._under_way.pop(seq_id, None) for seq_id in dropped]
        self._under_way |= {seq_id: compiler.begin(each) for seq_id, each in asked.items()}
        for future in unneeded:
            # other requests may have the same constraint
            if future is not None and future not in self._under_way.values():
                compiler.cancel(future)
        for seq_id in [seq_id for seq_id, future in self._under_way.items() if future.done()]:
            del self._under_way[seq_id]
        return list(self._under_way)
