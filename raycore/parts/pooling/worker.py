"""The worker's side of pooling: it ends the steps of models that pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from raycore.config import EngineConfig
from raycore.runner.heads import Head
from raycore.step.device_batch import DeviceBatch
from raycore.worker.part import WorkerPart


class PoolsHidden(WorkerPart):
    """Makes results of final hidden states."""

    option: ClassVar[str] = "runner='pooling'"

    @classmethod
    def is_needed(cls, config: EngineConfig) -> bool:
        return config.model.spec.pooling is not None

    def heads(self, batch: DeviceBatch) -> Sequence[Head]:
        # imported lazily: models that generate don't need it
        from raycore.parts.pooling.layers.pooler import Pooler
        from raycore.parts.pooling.runner import PoolingHead

        config, spec = self.core.config, self.core.config.model.spec.pooling
        assert spec is not None, "the model pools"
        pooler = Pooler(
            spec,
            self.core.model.heads,
            one_by_one=config.model.batch_invariant,
            computes_whole_prompts=config.scheduler.computes_whole_prompts,
        )
        return [PoolingHead(pooler, batch)]
