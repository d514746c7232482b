"""Makes a rank's scheduler, with what guesses the next tokens, from the engine's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from raycore.cache_layout import KVCacheConfig
from raycore.config import EngineConfig
from raycore.executor.base import Executor
from raycore.scheduler.protocol import SchedulerProtocol
from raycore.speculation.speculation import Speculation
from raycore.speculation.worker_guesses import WorkerGuesses

if TYPE_CHECKING:
    from raycore.kv_transfer.connector import SchedulerConnector
    from raycore.kv_transfer.events import KVCacheEvent


def make_speculation(config: EngineConfig, executor: Executor) -> Speculation | None:
    """What guesses tokens. None: the engine doesn't speculate."""
    if config.speculative_config is None:
        return None
    drafter, take = config.drafter, executor.take_draft_token_ids
    source = None if drafter is None else WorkerGuesses(drafter, take)
    return Speculation(config.speculative_config, config.scheduler.max_num_seqs, source)


def make_scheduler(
    scheduler_class: type[SchedulerProtocol],
    config: EngineConfig,
    cache: KVCacheConfig,
    speculation: Speculation | None,
    connector: SchedulerConnector | None = None,
    kv_events: list[KVCacheEvent] | None = None,
) -> SchedulerProtocol:
    """A scheduler for a rank with this KV cache."""
    # a class of somebody else may know nothing of these
    rare: dict[str, Any] = {
        "state_rows": config.state_rows,
        "encoder": config.encoder_limits,
        "kv_events": kv_events,
        "waits_for_output": config.has_logits_processors or None,
    }
    if connector is not None:
        rare["connector"] = (connector, config.kv_transfer_config)
    rare = {name: value for name, value in rare.items() if value is not None}
    return scheduler_class(
        config.scheduler,
        replace(config.cache, block_size=config.tokens_per_block),
        cache.num_blocks,
        config.model.spec.vocab_size,
        tells_tokens=config.tells_tokens,
        num_turns=num_turns(config),
        speculation=speculation,
        max_adapters=config.lora.max_loras if config.lora.enable_lora else 0,
        layout=cache.layout,
        **rare,
    )


def num_turns(config: EngineConfig) -> int:
    """In how many steps decodes take turns: in one for each stage that computes at the same time."""
    return min(config.max_steps_in_flight, config.parallel.pipeline_parallel_size)
