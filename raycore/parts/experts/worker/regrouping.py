"""A worker's experts when the number of ranks changes that share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from raycore.config import EngineConfig
from raycore.messages import StepPlan
from raycore.weights.loader import empty_decoder_weights
from raycore.worker.failures import fails_together
from raycore.worker.memory_sizes import free_bytes
from raycore.worker.part import WorkerPart, called_by_name
from raycore.worker.rank import MemoryNeed, Regrouping
from raycore.worker.warm_up import warm_up_plans


class ExpertRegrouping(WorkerPart):
    """Moves experts between the workers of an engine's ranks."""

    option = "enable_expert_parallel=True"

    @classmethod
    def is_needed(cls, config: EngineConfig) -> bool:
        return config.parallel.enable_expert_parallel

    @called_by_name
    def memory_need(self, num_ranks: int, num_local_workers: Sequence[int], num_blocks: int) -> MemoryNeed:
        """Return how much more memory this worker needs if `num_ranks` ranks share experts.

        Args:
            num_local_workers: for each worker of this rank, the number of workers of all these ranks on its node.
            num_blocks: size of the KV cache, which counts if this worker is new.
        """
        needed = self.core.sizes.more_for(num_ranks, num_blocks)
        available = free_bytes(self.core.setup.device) // num_local_workers[self.core.rank.worker]
        return MemoryNeed(max(0, needed), available)

    @called_by_name
    @fails_together
    def regroup(self, regrouping: Regrouping) -> None:
        """Leave the workers that this one shares experts with, and join others, between two steps.

        All workers of all ranks that stay, come or leave must do this at the same time. Experts move from worker to
        worker. A new worker gets all its weights from others, and needs its cache afterwards.

        Raises: if another worker is gone or stuck. This one can't continue then.
        """
        core, before = self.core, self.core.setup
        core.before_change()
        setup = before.with_ranks(regrouping.num_ranks, regrouping.rendezvous)
        exchange = core.groups.regroup(setup, regrouping)
        core.take(replace(setup, rank=msgspec.structs.replace(setup.rank, is_new=False)))
        if before.rank.is_new:
            weights = empty_decoder_weights(core.setup.share)
            exchange.receive(weights)
            core.model.build(core.setup, weights)
        else:
            core.model.exchange_experts(exchange, before.experts, core.setup.experts)
            if core.groups.experts is None:
                core.runner.run_alone()
            else:
                core.runner.share_experts(core.groups.experts)
        for regrouped in core.hooks.regrouped:
            regrouped()
        exchange.close()
        core.groups.end_regrouping()

    @called_by_name
    @fails_together
    def accompany_warm_up(self) -> None:
        """Take part in the `warm_up()` of new workers, which need the others' experts."""
        for plan in warm_up_plans(self.core.setup, self.core.num_cache_groups):
            self.core.runner.execute(StepPlan(plan.step))
