"""What requests wait for before they are scheduled: that the workers have their grammars and their LoRA adapters.

No method waits for the workers, except `sleep()` and `wake()` of adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raycore.engine.part import EnginePart, Prepared
from raycore.errors import InvalidRequest
from raycore.executor.base import Executor
from raycore.messages import EngineRequest, StepPlan
from raycore.parts.adapters.engine.adapters import AdaptersInUse
from raycore.parts.constraints.engine import GrammarsUnderWay
from raycore.scheduler.outputs import StepOutputs
from raycore.scheduler.protocol import SchedulerProtocol


class GrammarWaits(EnginePart):
    """Requests that wait until their grammars have been compiled, or for too long."""

    def __init__(self, grammars: GrammarsUnderWay) -> None:
        self.grammars = grammars

    def must_wait(self, request: EngineRequest) -> bool:
        return request.params.structured_outputs is not None

    def added(self, request: EngineRequest) -> None:
        if request.params.structured_outputs is not None:
            self.grammars.add(request.seq_id, request.params.structured_outputs)

    def dropped(self, seq_id: int) -> None:
        self.grammars.drop(seq_id)

    def take_prepared(self) -> Prepared:
        return Prepared(self.grammars.take_done())

    def keeps_back(self, seq_id: int) -> bool:
        return seq_id in self.grammars

    def is_preparing(self) -> bool:
        return bool(self.grammars)


class AdapterWaits(EnginePart):
    """Requests that wait until the workers have read their adapters, and what those that run use."""

    def __init__(self, executor: Executor, num_adapters: int, scheduler: SchedulerProtocol) -> None:
        """`num_adapters`: without the one for a new revision."""
        self.adapters = AdaptersInUse(executor, num_adapters)
        self._give = scheduler.give_adapter

    def calls(self) -> dict[str, Callable[..., Any]]:
        return {
            "begin_adapter": self.adapters.begin,
            "sync_adapters": self.adapters.sync,
            "give_up_adapter": self.adapters.give_up,
        }

    def must_wait(self, request: EngineRequest) -> bool:
        if request.lora is None:
            return False
        self.adapters.check(request.lora)
        return True

    def added(self, request: EngineRequest) -> None:
        if request.lora is not None:
            self.adapters.add(request.seq_id, request.lora, request.lora_revision)

    def dropped(self, seq_id: int) -> None:
        self.adapters.drop(seq_id)

    def take_prepared(self) -> Prepared:
        ready, failed = self.adapters.take_done()
        for seq_id, adapter in ready.items():
            self._give(seq_id, adapter.slot, adapter.load_id)
        return Prepared(list(ready), list(failed.items()))

    def keeps_back(self, seq_id: int) -> bool:
        return seq_id in self.adapters

    def is_preparing(self) -> bool:
        return bool(self.adapters)

    def step_done(self, plan: StepPlan, outputs: StepOutputs) -> None:
        """Add the revisions of the adapters of requests that have begun."""
        seq_ids = [seq_id for seq_id, _ in outputs.started]
        revisions = [(seq_id, self.adapters.revision(seq_id)) for seq_id in seq_ids]
        self.adapters.note_begun(seq_ids)
        outputs.adapter_revisions = [(seq_id, revision) for seq_id, revision in revisions if revision is not None]

    def load(self) -> dict[str, Any]:
        return {"adapters": self.adapters.use()}

    def sleep(self, *, drops: bool) -> None:
        self.adapters.sleep(drops=drops)

    def wake(self, timeout_s: float) -> None:
        self.adapters.wake(timeout_s)


class NoAdapters(EnginePart):
    """Refuses adapters, of an engine without `enable_lora`."""

    def must_wait(self, request: EngineRequest) -> bool:
        if request.lora is not None:
            raise InvalidRequest(f"lora_request={request.lora.lora_name!r} needs an engine with enable_lora=True")
        return False
