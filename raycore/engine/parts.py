"""Makes the parts of a rank's engine from its configuration, one line for each capability."""

from __future__ import annotations

from collections.abc import Iterator

from raycore.cache_layout import KVCacheConfig
from raycore.config import EngineConfig
from raycore.engine.part import EnginePart, PartedEngine
from raycore.engine.preparation import AdapterWaits, GrammarWaits, NoAdapters
from raycore.engine.scheduling import Shared, make_masks, make_speculation
from raycore.engine.step_timing import SpeculationTiming
from raycore.executor.base import Executor
from raycore.executor.reports import ReportsOfAll
from raycore.parts.constraints.engine import GrammarsUnderWay, by_workers, here
from raycore.parts.constraints.grammar.prepared import PreparedGrammars
from raycore.parts.experts.engine.expert_group import ExpertGroup
from raycore.parts.images.engine import FeatureInputs
from raycore.parts.transfers.connectors.identity import Identity
from raycore.parts.weights.engine import RankWeights


def start_workers(config: EngineConfig, executor: Executor, rendezvous: str | None, *, is_new: bool) -> Identity:
    """Start the workers, which read the weights. Returns the identity of what they compute.

    Raises:
        InitializationError: a worker failed to start.
    """
    identity = Identity(config)
    with identity.reading():
        executor.initialize(rendezvous, is_new=is_new)
    return identity


def make_shared(
    config: EngineConfig, cache: KVCacheConfig, executor: Executor, dp_rank: int, *, is_new: bool
) -> Shared:
    """Make what there is.

    `is_new`: whether the cache is only allocated when the rank joins a group of ranks that share experts.

    Raises:
        InvalidConfig: the connector can't be imported, or refuses its settings, or an endpoint can't be bound.
        WorkerFailed: a worker's side of the connector failed.
    """
    connector = events = None
    if config.kv_transfer_config is not None:
        from raycore.parts.transfers.engine import make_connector  # imported lazily, as below: few engines need it

        connector = make_connector(config, cache, executor, dp_rank, has_cache=not is_new)
    if config.kv_events_config is not None:
        from raycore.parts.transfers.engine import KVEvents

        events = KVEvents(config, dp_rank, connector)
    if config.routed_experts.enable_return_routed_experts and config.parallel.pipeline_parallel_size > 1:
        executor.kv_output_aggregator = ReportsOfAll()
    return Shared(make_speculation(config, executor), connector, events, make_masks(config, executor))


def make_parts(engine: PartedEngine, shared: Shared, identity: Identity, *, is_new: bool) -> Iterator[EnginePart]:
    """Yield the parts, in the order in which their hooks are called.

    Args:
        identity: of what the workers compute.
        is_new: whether the rank has yet to join a group of ranks that share experts.
    """
    config, executor, scheduler = engine.config, engine.executor, engine.scheduler
    yield RankWeights(engine, identity)
    yield ExpertGroup(engine, is_new=is_new)
    yield GrammarWaits(_make_grammars(config, executor, shared))
    if config.lora.enable_lora:
        yield AdapterWaits(executor, config.lora.num_adapters, scheduler)
    else:
        yield NoAdapters()
    if config.encoder_limits is not None:
        yield FeatureInputs(config.feature_cache_bytes, scheduler.reset_encoder_cache)
    if shared.speculation is not None:
        yield SpeculationTiming(shared.speculation)
    if shared.kv_events is not None:
        yield shared.kv_events  # before the connector, whose last events it takes when it closes
    if shared.connector is not None:
        from raycore.parts.transfers.engine import ConnectorCalls

        yield ConnectorCalls(engine, shared.connector, is_new=is_new)


def _make_grammars(config: EngineConfig, executor: Executor, shared: Shared) -> GrammarsUnderWay:
    """Make what compiles grammars: where masks are made, and on workers that draft, whose guesses follow them, too."""
    if shared.masks is None:
        return GrammarsUnderWay(by_workers(executor))
    own = here(PreparedGrammars(shared.masks.compiler))
    return GrammarsUnderWay(own) if config.drafter is None else GrammarsUnderWay(own, by_workers(executor))
