"""Decides how often a process that fails is restarted, and how soon. Pure."""

from __future__ import annotations

from raycore.config import RecoveryConfig


class RestartBudget:
    """Limits how often a rank is restarted, and gives the delay before each restart."""

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._starts_s: list[float] = []
        """When the process is, or was, restarted."""

    def next_delay_s(self, now_s: float, lost_s: float | None = None) -> float | None:
        """Count a restart, and return the seconds to wait before it. None if there were too many restarts already.

        `lost_s`: when the process was lost. None: now. Attempts since then all count, however long they take: slow ones
        would never be too many.
        """
        first_s = (now_s if lost_s is None else lost_s) - self._config.restart_window_s
        crash_loop_began_s = now_s - self._config.crash_loop_s
        self._starts_s = [start_s for start_s in self._starts_s if start_s >= min(first_s, crash_loop_began_s)]
        if sum(start_s >= first_s for start_s in self._starts_s) >= self._config.max_rank_restarts:
            return None
        num_recent = sum(start_s > crash_loop_began_s for start_s in self._starts_s)
        # no delay if the rank had served for a while before it died: only crash loops need a back-off
        backoff_s = self._config.restart_backoff_s * 2 ** (num_recent - 1) if num_recent else 0.0
        delay_s = min(self._config.max_restart_backoff_s, backoff_s)
        self._starts_s.append(now_s + delay_s)
        return delay_s

    def give_back(self) -> None:
        """Don't count the latest restart, because nothing was restarted."""
        self._starts_s.pop()
