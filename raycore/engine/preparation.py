"""What requests wait for before they are scheduled: that the workers have their grammars and their LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raycore.config import LoRAConfig
from raycore.engine.adapter_slots import AdapterLoad
from raycore.engine.adapters import AdaptersInUse
from raycore.engine.grammars import GrammarsUnderWay
from raycore.errors import InvalidRequest
from raycore.executor.base import Executor
from raycore.messages import EngineRequest


class Prepared(NamedTuple):
    """Requests that wait no more."""

    adapters: dict[int, AdapterLoad]
    """By seq_id: the adapters that are ready. A request may still wait for its grammar."""
    seq_ids: list[int]
    """Requests that may start."""
    failed: dict[int, str]
    """By seq_id: why the adapters of requests can't be used."""


class Preparation:
    """The requests of one rank that wait for their grammars and adapters. No method waits for the workers."""

    def __init__(self, config: LoRAConfig, executor: Executor) -> None:
        self.adapters = AdaptersInUse(executor, config.num_adapters) if config.enable_lora else None
        """None: the engine has no `enable_lora`."""
        self._grammars = GrammarsUnderWay(executor)

    def __bool__(self) -> bool:
        """Whether a request waits, or the workers have something to do."""
        return bool(self._grammars or self.adapters)

    def must_wait(self, request: EngineRequest) -> bool:
        """Whether a request has to wait, before it may start.

        Raises:
            InvalidRequest: its adapter can't be used.
        """
        adapter = request.lora
        if adapter is not None:
            if self.adapters is None:
                raise InvalidRequest(f"lora_request={adapter.lora_name!r} needs an engine with enable_lora=True")
            self.adapters.check(adapter)
        return request.params.structured_outputs is not None or adapter is not None

    def add(self, request: EngineRequest) -> None:
        """Prepare what a request needs. It may need nothing."""
        if request.params.structured_outputs is not None:
            self._grammars.add(request.seq_id, request.params.structured_outputs)
        if request.lora is not None and self.adapters is not None:
            self.adapters.add(request.seq_id, request.lora, request.lora_revision)

    def drop(self, seq_id: int) -> None:
        """Note that a request has ended. Unknown seq_ids are ignored."""
        self._grammars.drop(seq_id)
        if self.adapters is not None:
            self.adapters.drop(seq_id)

    def take_done(self) -> Prepared:
        """Remove and return the requests whose grammars are ready or took too long, and whose adapters are ready."""
        with_grammar = self._grammars.take_done()
        if self.adapters is None:
            return Prepared({}, with_grammar, {})
        ready, failed = self.adapters.take_done()
        may_start = [seq_id for seq_id in with_grammar if seq_id not in self.adapters and seq_id not in failed]
        may_start += [seq_id for seq_id in ready if seq_id not in self._grammars and seq_id not in with_grammar]
        return Prepared(ready, may_start, failed)

    def note_begun(self, seq_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Note that requests have begun. Returns (seq_id, revision of the adapter) of those with adapters."""
        if self.adapters is None:
            return []
        revisions = [(seq_id, self.adapters.revision(seq_id)) for seq_id in seq_ids]
        self.adapters.note_begun(seq_ids)
        return [(seq_id, revision) for seq_id, revision in revisions if revision is not None]
