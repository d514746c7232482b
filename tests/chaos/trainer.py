"""A trainer whose updates are disturbed, and that tries again until they are applied."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.named_weights import NUM_VARIANTS, Tensors, number_of, tensors_of, variant_of
from raycore import AsyncLLM, RaycoreError
from raycore.messages import EngineInfo
from raycore.node.listeners import listen
from raycore.parts.weights.transfer.group import WeightGroup
from raycore.parts.weights.transfer.trainer import (
    join_weight_group,
    send_weights_distributed,
    send_weights_ray,
    send_weights_shared_memory,
)

WAYS = ("ray", "ipc", "nccl", "disk")
WHOLE, FILES, KILL, REFUSED, GIVEN_UP = "by tensors", "from files", "kill half-way", "one rank fails", "given up"
_KINDS = {WHOLE: 4, FILES: 2, KILL: 2, REFUSED: 1, GIVEN_UP: 1}
"""What an attempt is, and how often."""
_BUCKETS = 8
"""About how many buckets an update has. A call may bring several."""


class _GiveUp(Exception):
    """The trainer gives its update up."""


class Trainer:
    """Updates an engine's weights by one way."""

    def __init__(self, llm: AsyncLLM, way: str, variants: list[Path], timeout_s: float, rnd: random.Random) -> None:
        """`timeout_s`: of each wait for the engine."""
        self._llm = llm
        self._way = way
        self._variants = variants
        self._timeout_s = timeout_s
        self._rnd = rnd
        self._group: WeightGroup | None = None
        self._members: list[int] = []
        """The workers in the group."""
        self.current = "default"
        """The version that was applied last."""
        self.applied: Counter[str] = Counter()
        """By kind: updates that were applied."""
        self.failed: Counter[str] = Counter()
        """By kind: attempts that failed, although they weren't given up on purpose."""
        self.given_up = 0
        """How many attempts were given up half-way on purpose."""
        self.errors: list[str] = []
        self.on_half_way: Callable[[], object] = lambda: None
        """Called in the middle of some updates."""

    async def update(self, timeout_s: float) -> None:
        """Change the weights to others. Tries until that is done.

        Raises RaycoreError if the attempt that ends after `timeout_s` fails, too.
        """
        variant = self._rnd.choice([each for each in range(NUM_VARIANTS) if each != variant_of(self.current)])
        version = f"{number_of(self.current) + 1}-{variant}"
        deadline_s = time.monotonic() + timeout_s
        while True:
            kinds = {kind: weight for kind, weight in _KINDS.items() if self._way != "nccl" or kind != REFUSED}
            (kind,) = self._rnd.choices([*kinds], [*kinds.values()])
            try:
                await self._attempt(kind, variant, version)
            except _GiveUp:
                self.given_up += 1
                await self._end_attempt()
            except RaycoreError as error:
                self.failed[kind] += 1
                self.errors.append(f"update {version}, {kind}: {str(error).splitlines()[0][:200]}")
                if time.monotonic() > deadline_s:
                    raise
                await self._end_attempt()
            else:
                self.applied[kind] += 1
                self.current = version
                return

    async def _end_attempt(self) -> None:
        self.leave()  # what has failed on a member, or was given up, has left the group in the middle of a broadcast
        await self._llm.cancel_weight_update()

    async def _attempt(self, kind: str, variant: int, version: str) -> None:
        path = self._variants[variant]
        if kind == FILES:
            await self._llm.reload_weights(path, version)
            return
        tensors = tensors_of(path)
        self._rnd.shuffle(tensors)
        if self._way == "nccl":
            await self._join()
        await self._llm.start_weight_update()
        await asyncio.to_thread(self._send, kind, path, tensors, asyncio.get_running_loop())
        await self._llm.finish_weight_update(version)

    # ---- on a thread

    def _send(self, kind: str, path: Path, tensors: Tensors, loop: asyncio.AbstractEventLoop) -> None:
        """Bring all tensors. In the middle, do what `kind` says."""
        num_calls = 0

        def update_weights(info: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 2:  # some have come, and more are to come
                info = self._disturbed(kind, info)
            call = self._llm.update_weights({"update_info": info})
            asyncio.run_coroutine_threadsafe(call, loop).result(self._timeout_s)

        bucket_bytes = sum(each.nbytes for _, each in tensors) // _BUCKETS
        if self._way == "disk":
            for _ in range(_BUCKETS):  # there is one file, which may be read again
                update_weights({"path": str(path)})
            return
        sends: dict[str, Callable[..., None]] = {
            "ray": send_weights_ray,
            "ipc": send_weights_shared_memory,
            "nccl": lambda *args, **options: send_weights_distributed(self._joined, *args, **options),
        }
        sends[self._way](update_weights, tensors, bucket_bytes=bucket_bytes)

    def _disturbed(self, kind: str, info: dict[str, Any]) -> Any:
        if kind == GIVEN_UP:
            raise _GiveUp
        if kind == KILL:
            self.on_half_way()
        if kind == REFUSED:  # one entry for each worker of all ranks
            infos = [info] * self._num_workers
            infos[self._rnd.randrange(len(infos))] = {"nothing": "that this way knows"}
            return infos
        return info

    # ---- torch.distributed

    @property
    def _joined(self) -> WeightGroup:
        assert self._group is not None, "_join() comes first"
        return self._group

    @property
    def _num_workers(self) -> int:
        config = self._llm.config.parallel
        return config.world_size * config.data_parallel_size

    async def _join(self) -> None:
        """Have the workers of ranks that are up in a group, anew if some were replaced.

        Others won't take part in broadcasts, and get the weights from those that do.
        """
        deadline_s = time.monotonic() + self._timeout_s
        while not (up := self._up()) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)
        members = [pid for info in up for pid in (info.pid, *info.worker_pids)]
        if self._group is not None and members == self._members:
            return
        self.leave()
        listener = listen("127.0.0.1")
        port = listener.getsockname()[1]
        per_rank = self._llm.config.parallel.world_size
        size = 1 + per_rank * len(up)
        # workers count those of all ranks: up are neighbors
        offset = 1 - per_rank * up[0].dp_rank if up else 1
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": offset, "world_size": size}
        joining = asyncio.to_thread(join_weight_group, "127.0.0.1", listener, size, self.group_timeout_s)
        group, call = await asyncio.gather(
            joining, self._llm.init_weight_transfer_engine({"init_info": info}), return_exceptions=True
        )
        for each in (call, group):
            if isinstance(each, BaseException):
                raise each
        assert isinstance(group, WeightGroup)
        self._group, self._members = group, members

    def _up(self) -> list[EngineInfo]:
        """The first of the ranks that take part in updates, and those that do so of the ranks with the next numbers."""
        states = {rank.dp_rank: rank.state for rank in self._llm.ranks}
        up = [info for info in self._llm.engine_infos if states.get(info.dp_rank) in ("serving", "paused", "stale")]
        return [info for number, info in enumerate(up) if info.dp_rank == up[0].dp_rank + number]

    group_timeout_s = 5.0
    """How long members of a group wait for each other."""

    def leave(self) -> None:
        """Leave the group with the workers, if there is one."""
        if self._group is not None:
            self._group.close()
        self._group, self._members = None, []
