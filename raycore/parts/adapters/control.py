"""Adds LoRA adapters to a running engine, on all its ranks, and removes them.

An adapter is added in two parts. First all ranks read it, and keep it aside. Only if all of them can, they get the new
list of added adapters. The manager keeps that list: ranks that join, for example because one was lost, get it before
they serve. Steps go on meanwhile. `EngineCalls` documents the calls.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from raycore.client.client import EngineClient
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.rank import Rank
from raycore.cluster.supervisor import Supervisor
from raycore.config import EngineConfig
from raycore.control.replies import Replies, ask_ranks, check_running
from raycore.errors import InvalidInput, InvalidRequest, RpcTimeout
from raycore.json_fields import shortened
from raycore.lora.request import LoRARequest
from raycore.parts.adapters.values import AddedAdapter, AddedAdapters
from raycore.system import threading

logger = logging.getLogger(__name__)


class AdapterCalls:
    """The calls that add and remove adapters. Thread-safe: calls wait for each other."""

    def __init__(
        self, manager: CoreEngineActorManager, supervisor: Supervisor, client: EngineClient, config: EngineConfig
    ) -> None:
        self._desired = manager.desired
        self._supervisor = supervisor
        self._client = client
        self._config = config.lora
        self._timeout_s = config.executor.execute_timeout_s
        self._changing = threading.Lock()
        self._revisions = itertools.count(1)

    def add(self, adapter: LoRARequest) -> bool:
        """Add an adapter. Returns False if it was added before and isn't replaced."""
        self._client.checks.adapters.check_new(adapter)
        with self._change() as before:
            there = _find(adapter, before)
            if there is not None and not adapter.load_inplace:
                if not self._is_asleep:
                    self._read(there, f"add_lora({adapter.lora_name!r})")
                    self._tell(before, [adapter.lora_int_id])
                return False
            self._check_awake("add_lora()")
            new = AddedAdapter(
                msgspec.structs.replace(adapter, load_inplace=False),
                next(self._revisions),
                is_replacement=adapter.load_inplace,
                is_pinned=there is not None and there.is_pinned,
            )
            self._read(new, f"add_lora({adapter.lora_name!r})")
            self._tell(before.with_adapter(new), [adapter.lora_int_id])
        return True

    def remove(self, lora_id: int) -> bool:
        """Remove an adapter. Returns False if none with this number was added."""
        self._check_id("remove_lora", lora_id)
        with self._change() as before:
            if before.find(lora_id) is None:
                return False
            self._tell(before.without(lora_id), [])
        return True

    def pin(self, lora_id: int) -> bool:
        """Pin an adapter that was added. Returns True."""
        self._check_id("pin_lora", lora_id)
        with self._change() as before:
            there = before.find(lora_id)
            if there is None:
                known = ", ".join(map(str, sorted(before.ids()))) or "none"
                raise InvalidInput(f"pin_lora(): lora_id={lora_id} isn't an adapter that was added; these are: {known}")
            num_pinned = sum(each.is_pinned for each in before.adapters)
            num_adapters = self._config.num_adapters
            if num_pinned - there.is_pinned >= num_adapters:
                raise InvalidInput(
                    f"pin_lora(): lora_id={lora_id} can't be pinned, because all max_cpu_loras={num_adapters} slots "
                    "for adapters are: remove one of these, or raise max_cpu_loras"
                )
            self._check_awake("pin_lora()")
            self._read(there, f"pin_lora({lora_id})")
            self._tell(before.with_adapter(msgspec.structs.replace(there, is_pinned=True)), [lora_id])
        return True

    def ids(self) -> set[int]:
        """The numbers of the adapters that were added."""
        return set(self._desired.now.adapters.ids())

    # ---- details

    def _check_id(self, method: str, lora_id: object) -> None:
        if not self._config.enable_lora:
            raise InvalidInput(f"{method}() needs an engine with enable_lora=True")
        if isinstance(lora_id, bool) or not isinstance(lora_id, int):
            raise InvalidInput(f"{method}(): lora_id={shortened(lora_id)} isn't an integer")

    @contextmanager
    def _change(self) -> Generator[AddedAdapters, None, None]:
        """Wait until other changes are over. Gives the list as it is then."""
        with self._changing:
            check_running(self._supervisor)
            with self._desired.asking():
                yield self._desired.now.adapters
            check_running(self._supervisor)

    @property
    def _is_asleep(self) -> bool:
        return "weights" in self._desired.now.activity.asleep

    def _check_awake(self, call: str) -> None:
        if self._is_asleep:
            raise InvalidInput(f"{call}: the engine is asleep, so its workers hold no adapters: call wake_up() first")

    def _read(self, adapter: AddedAdapter, call: str) -> None:
        """Have all ranks read an adapter, and keep it aside. If one of them can't, none keeps it.

        Raises: what `EngineCalls.add_lora` raises. The message begins with `call`.
        """
        replies = self._ask(self._desired.running(), "begin_adapter", adapter)
        unable = [(rank, error) for rank, error in replies.errors if isinstance(error, InvalidInput)]
        if not unable and not replies.late:
            return
        self._ask(
            [*(rank for rank, _ in (*replies.results, *unable)), *replies.late], "give_up_adapter", adapter.revision
        )
        check_running(self._supervisor)
        for rank, error in unable:
            raise type(error)(f"{call}: dp_rank {rank.dp_rank}: {error}") from None
        late = sorted(rank.dp_rank for rank in replies.late)
        raise RpcTimeout(
            f"{call}: dp_ranks {late} haven't read {adapter.adapter.lora_path} within "
            f"execute_timeout_s={self._timeout_s:g}"
        )

    def _tell(self, added: AddedAdapters, wanted: list[int]) -> None:
        """Bring all ranks level with a list, and have them hold the adapters with the numbers `wanted`."""
        ranks = self._desired.change(adapters=added)
        replies = self._ask(ranks, "sync_adapters", added, wanted)
        for rank, failed in replies.results:
            for lora_id, error in failed.items():
                # it has joined after the others had read it, or the files have changed since
                logger.warning(
                    "dp_rank %d doesn't hold the adapter with lora_int_id=%d: %s", rank.dp_rank, lora_id, error
                )
        for rank in replies.late:
            # its replacement gets the list
            self._supervisor.report(rank.dp_rank, f"it hasn't taken a list of adapters within {self._timeout_s:g} s")

    def _ask(self, ranks: Sequence[Rank], method: str, *args: Any) -> Replies[Any]:
        replies = ask_ranks(ranks, method, lambda rank: args, self._timeout_s, self._supervisor)
        for rank, error in replies.errors:
            if not isinstance(error, InvalidInput):
                # its replacement gets the list
                logger.warning("dp_rank %d was lost while adapters changed: %s", rank.dp_rank, error)
        return replies


def _find(adapter: LoRARequest, added: AddedAdapters) -> AddedAdapter | None:
    """The adapter that was added before with the same name and number.

    Raises:
        InvalidRequest: another one has this name or this number.
    """
    by_id, by_name = added.find(adapter.lora_int_id), added.named(adapter.lora_name)
    name, number = f"lora_name={adapter.lora_name!r}", f"lora_int_id={adapter.lora_int_id}"
    if by_id is not None and by_id.adapter.lora_name != adapter.lora_name:
        raise InvalidRequest(
            f"add_lora({adapter.lora_name!r}): {number} is the number of {by_id.adapter.lora_name!r}, which was added: "
            "give another number, or remove that one first"
        )
    if by_name is not None and by_name.adapter.lora_int_id != adapter.lora_int_id:
        raise InvalidRequest(
            f"add_lora({adapter.lora_name!r}): {name} was added with lora_int_id={by_name.adapter.lora_int_id}, not "
            f"with {adapter.lora_int_id}: give another name, or remove that one first"
        )
    if by_id is not None and by_id.adapter.lora_path != adapter.lora_path and not adapter.load_inplace:
        raise InvalidRequest(
            f"add_lora({adapter.lora_name!r}): {number} was added from {by_id.adapter.lora_path}, not from "
            f"{adapter.lora_path}: give load_inplace=True to replace it, or another name and number"
        )
    return by_id
