"""Calls on a running engine that block until its ranks have replied. `LLM` and `AsyncLLM` offer them to users."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raycore.checkpoint.sharded_state import checked_pattern
from raycore.client.client import UTILITY_TIMEOUT_S, EngineClient
from raycore.cluster.supervisor import Supervisor
from raycore.config import EngineConfig
from raycore.control.added_adapters import AdapterCalls
from raycore.control.pauses import Pauses
from raycore.errors import InvalidConfig

RPC_GRACE_S = 5.0
"""How many seconds longer the caller of `collective_rpc` waits than the ranks, so that a rank can still report which of
its workers is late."""


class EngineCalls:
    """The calls on one engine. Thread-safe."""

    def __init__(
        self,
        client: EngineClient,
        supervisor: Supervisor,
        pauses: Pauses,
        adapters: AdapterCalls,
        config: EngineConfig,
    ) -> None:
        self.pauses = pauses
        self.adapters = adapters
        self._client = client
        self._config = config
        self._supervisor = supervisor

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """See `LLM.collective_rpc`."""
        within_s = UTILITY_TIMEOUT_S if timeout is None else timeout + RPC_GRACE_S
        replies = self._client.utility("collective_rpc", (method, timeout, args, kwargs or {}), within_s)
        return [result for reply in replies for result in reply]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `LLM.reset_prefix_cache`."""
        return all(self._client.utility("reset_prefix_cache", (reset_running_requests,)))

    def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """See `LLM.start_profile`."""
        self._client.utility("profile", (True, profile_prefix, delay_iterations, max_iterations))

    def stop_profile(self) -> None:
        """See `LLM.stop_profile`."""
        self._client.utility("profile", (False,))

    def save_sharded_state(
        self, path: str | os.PathLike[str], pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """See `LLM.save_sharded_state`."""
        config = self._config.with_num_ranks(max(1, len(self._supervisor.watches())))
        if config.model.spec.quantization is not None:
            raise InvalidConfig(f"{config.model.model} has quantized weights, which save_sharded_state() can't write")
        arguments = os.path.abspath(Path(path).expanduser()), checked_pattern(pattern, config.division), max_size
        # ranks that share no experts all have the same weights
        num_ranks = None if config.parallel.enable_expert_parallel else 1
        timeout_s = config.executor.init_timeout_s + RPC_GRACE_S
        self._client.utility("save_sharded_state", arguments, timeout_s, num_ranks=num_ranks)

    def check_health(self) -> None:
        """See `LLM.check_health`."""
        self._client.utility("check_health", ())

    def scale(self, data_parallel_size: int, drain_timeout_s: float | None = None) -> None:
        """See `LLM.scale`."""
        self._supervisor.scale(data_parallel_size, drain_timeout_s)
