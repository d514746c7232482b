"""Compiles the grammars of waiting requests on background threads while steps run. Does not import torch.

A worker follows grammars itself where it drafts, or if its engine's scheduler makes no masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raycore.parts.constraints.grammar.prepared import PreparedGrammars, wait_until_loaded
from raycore.structured_outputs import StructuredOutputsParams
from raycore.system import Future
from raycore.worker.part import WorkerPart, called_by_name

if TYPE_CHECKING:
    from raycore.worker.core import WorkerCore


class GrammarPreparation(WorkerPart):
    """The grammars that requests will need. Only the last stage needs any."""

    def __init__(self, core: WorkerCore) -> None:
        super().__init__(core)
        self._prepared = PreparedGrammars(core.grammars)
        self._loading: list[Future[Any]] = []
        """What the first grammar needs: the tokenizer and llguidance."""
        drafts = core.config.workers_draft or core.config.drafter is not None
        follows = drafts or core.config.scheduler.scheduler_cls is not None
        if core.config.model.prepare_structured_outputs and core.rank.is_last_stage and follows:
            self._loading.append(core.grammars.prepare())

    def warmed_up(self) -> None:
        """Wait for what is being loaded.

        Raises:
            InvalidConfig: it could not be loaded.
        """
        for loading in self._loading:
            wait_until_loaded(loading, self.core.config.executor.init_timeout_s)

    @called_by_name
    def prepare_grammars(self, asked: Mapping[int, StructuredOutputsParams], dropped: Sequence[int] = ()) -> list[int]:
        """Start to compile grammars of waiting requests in the background. Only the last stage needs grammars.

        See `PreparedGrammars.prepare`.
        """
        return self._prepared.prepare(asked, dropped) if self.core.rank.is_last_stage else []
