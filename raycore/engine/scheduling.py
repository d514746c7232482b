"""Makes a rank's scheduler from the engine's configuration: its parts, one line for each capability."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from raycore.cache_layout import KVCacheConfig
from raycore.config import EngineConfig
from raycore.errors import InvalidConfig
from raycore.executor.base import Executor
from raycore.kvcache.snapshots import Snapshots
from raycore.parts.adapters.scheduler import AdapterLimit
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.parts.constraints.grammar.prepared import wait_until_loaded
from raycore.parts.constraints.scheduler import Constraints, GrammarMasks
from raycore.parts.drafts.scheduler.drafting import DraftPlanning, PlanningAhead
from raycore.parts.drafts.scheduler.speculation import Speculation
from raycore.parts.drafts.scheduler.worker_drafts import DraftsAhead, WorkerDrafts
from raycore.parts.drafts.scheduler.worker_guesses import WorkerGuesses
from raycore.parts.images.scheduler import EncoderInputs
from raycore.parts.routed_experts.scheduler import CachedExperts
from raycore.scheduler.part import SchedulerPart
from raycore.scheduler.prefix_states import PrefixStates
from raycore.scheduler.prefixes import Prefixes
from raycore.scheduler.protocol import SchedulerProtocol, load_scheduler_class
from raycore.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from raycore.parts.transfers.connectors.connector import SchedulerConnector
    from raycore.parts.transfers.engine import KVEvents


class Shared(NamedTuple):
    """What parts of the scheduler and parts of the engine share. None: the engine has no such thing."""

    speculation: Speculation | None = None
    connector: SchedulerConnector | None = None
    kv_events: KVEvents | None = None
    masks: GrammarMasks | None = None


def make_speculation(config: EngineConfig, executor: Executor) -> Speculation | None:
    """What guesses tokens. None: the engine doesn't speculate."""
    if config.speculative_config is None:
        return None
    if config.workers_draft:
        kind = DraftsAhead if config.drafts_ahead else WorkerDrafts
        return kind(config.speculative_config, config.scheduler.max_num_seqs)
    drafter, take = config.drafter, executor.take_draft_token_ids
    source = None if drafter is None else WorkerGuesses(drafter, take)
    return Speculation(config.speculative_config, config.scheduler.max_num_seqs, source)


def load_scheduler_for(config: EngineConfig) -> type[SchedulerProtocol] | type[Scheduler]:
    """Return the class that `scheduler_cls` names, by default raycore's own.

    Raises:
        InvalidConfig: the class can't be imported, or can't do what the configuration asks.
    """
    scheduler_class = load_scheduler_class(config.scheduler)
    if config.workers_draft and not issubclass(scheduler_class, Scheduler):
        raise InvalidConfig(
            f"scheduler_cls={config.scheduler.scheduler_cls!r} isn't a subclass of raycore's Scheduler, and so can't "
            "have workers draft, as speculative_config needs with several steps in flight: use async_scheduling=False"
        )
    has_connector = config.kv_transfer_config is not None
    if has_connector and config.state_rows is not None and not issubclass(scheduler_class, Scheduler):
        raise InvalidConfig(
            f"scheduler_cls={config.scheduler.scheduler_cls!r} isn't a subclass of raycore's Scheduler, and so can't "
            "bring back states of layers, as kv_transfer_config needs with this model: omit one of them"
        )
    return scheduler_class


def make_masks(config: EngineConfig, executor: Executor) -> GrammarMasks | None:
    """What makes masks for constrained requests. None: workers follow the constraints themselves.

    Raises:
        InvalidConfig: what `prepare_structured_outputs` loads could not be loaded.
    """
    # of drafts that workers make while a step begins, only they know what comes next
    if not executor.takes_masks or config.workers_draft or not issubclass(load_scheduler_for(config), Scheduler):
        return None
    model = config.model
    compiler = GrammarCompiler(model.tokenizer, model.spec.vocab_size, model.spec.eos_token_ids)
    if model.prepare_structured_outputs:
        wait_until_loaded(compiler.prepare(), config.executor.init_timeout_s)
    return GrammarMasks(compiler, model.spec.vocab_size)


def make_scheduler(
    scheduler_class: type[SchedulerProtocol] | type[Scheduler],
    config: EngineConfig,
    cache: KVCacheConfig,
    shared: Shared,
) -> SchedulerProtocol:
    """A scheduler for a rank with this KV cache."""
    # a state is kept where a step begins: with drafts, nobody knows where that is before the last token arrives
    waits = config.has_logits_processors or (config.workers_draft and config.state_rows is not None)
    others: dict[str, Any] = {"waits_for_output": True} if waits else {}
    if issubclass(scheduler_class, Scheduler):
        others["parts"] = list(_parts(config, cache, shared))
    else:
        others |= _what_parts_are_made_of(config, shared)
    made: Any = scheduler_class(
        config.scheduler,
        replace(config.cache, block_size=config.tokens_per_block),
        cache.num_blocks,
        config.model.spec.vocab_size,
        tells_tokens=config.tells_tokens,
        num_turns=num_turns(config),
        layout=cache.layout,
        **others,
    )
    return made


def _parts(config: EngineConfig, cache: KVCacheConfig, shared: Shared) -> Iterator[SchedulerPart]:
    """Yield what a scheduler has besides. Not in the order in which their hooks are called: see `SchedulerPart`."""
    has_prefixes, snapshots = config.cache.enable_prefix_caching, Snapshots(range(0))
    if has_prefixes:
        yield Prefixes()
    if has_prefixes and config.state_rows is not None:
        states = PrefixStates(config.state_rows)
        snapshots = states.snapshots
        yield states
    if config.routed_experts.enable_return_routed_experts:
        yield CachedExperts(config.model.spec)
    if shared.speculation is not None:
        yield (PlanningAhead if config.drafts_ahead else DraftPlanning)(shared.speculation)
    if config.encoder_limits is not None:
        yield EncoderInputs(config.encoder_limits)
    if config.lora.enable_lora:
        yield AdapterLimit(config.lora.max_loras)
    # ranks that share experts start the next step together, and with more in flight some masks would still be to come
    can_defer = config.max_steps_in_flight == 2 or not config.parallel.is_lockstep
    yield Constraints(defers_masks=can_defer and shared.masks is not None and shared.speculation is None)
    if shared.masks is not None:
        yield shared.masks
    if shared.connector is not None and config.kv_transfer_config is not None:
        # imported lazily, as below: few engines need it
        from raycore.parts.transfers.scheduler.state_blocks import StateBlocks
        from raycore.parts.transfers.scheduler.transfers import Transfers

        yield Transfers(shared.connector, config.kv_transfer_config, StateBlocks(snapshots, cache.num_state_parts))
    if shared.kv_events is not None:
        from raycore.parts.transfers.scheduler.cache_events import CacheEvents

        yield CacheEvents(shared.kv_events.events)


def _what_parts_are_made_of(config: EngineConfig, shared: Shared) -> dict[str, Any]:
    """Return what a class gets instead that isn't a subclass of `Scheduler`: see `SchedulerProtocol`."""
    # a class of somebody else may know nothing of these
    rare = {
        "state_rows": config.state_rows,
        "encoder": config.encoder_limits,
        "connector": None if shared.connector is None else (shared.connector, config.kv_transfer_config),
        "kv_events": None if shared.kv_events is None else shared.kv_events.events,
    }
    max_adapters = config.lora.max_loras if config.lora.enable_lora else 0
    given = {name: value for name, value in rare.items() if value is not None}
    return {"speculation": shared.speculation, "max_adapters": max_adapters, **given}


def num_turns(config: EngineConfig) -> int:
    """In how many steps decodes take turns: in one for each stage that computes at the same time."""
    return min(config.max_steps_in_flight, config.parallel.pipeline_parallel_size)
