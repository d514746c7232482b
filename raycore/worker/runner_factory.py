"""Makes a worker's model runner: the KV cache, attention, the sampler and what drafts, around the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from raycore.attention.divided import GatheredRowsAttention
from raycore.attention.grouped import GroupedAttention, LayerPlace
from raycore.attention.native import NativeAttention
from raycore.attention.paged_cache import CachePages
from raycore.attention.spec import Attention, AttentionSpec, NoAttention, WeightCopies
from raycore.cache_layout import KVCacheConfig, WorkerCacheSpec
from raycore.config.logits_processors import processor_classes
from raycore.decoder.network import FollowsPlans
from raycore.errors import InvalidConfig
from raycore.parallel.returned_tokens import TokenReceiver
from raycore.parts.drafts.runner.drafter import NO_DRAFTER, Drafting
from raycore.parts.drafts.worker import Drafted, Followed
from raycore.parts.images.runner import StepImages
from raycore.runner.decode_graphs import CudaCapture, DecodeGraphs, decode_sizes
from raycore.runner.execution import BY_OPERATION, GraphedSteps, StepExecution
from raycore.runner.heads import Head, NextStage
from raycore.runner.part import PlanFollower, RunnerPart
from raycore.runner.recorded_layers import RecordedLayers
from raycore.runner.rows import StepRows
from raycore.runner.runner import ModelRunner
from raycore.runner.sampling_head import SamplingHead, also_sent
from raycore.runner.sources import Source, StageBefore, Tokens, TokensWithImages
from raycore.runner.step_parts import AdaptedRows, ReturnedTokens
from raycore.sampling.sampler import Sampler
from raycore.state.state_layers import StateLayers
from raycore.step.batch import SlotBatch
from raycore.step.device_batch import DeviceBatch
from raycore.step.features import SlotFeatures
from raycore.worker.cache_specs import layer_cache_specs
from raycore.worker.core import WorkerCore
from raycore.worker.groups import WorkerGroups
from raycore.worker.kept_forms import embeddings_of
from raycore.worker.setup import WorkerSetup
from raycore.worker.states import make_state_layers
from raycore.worker.worker_model import WorkerModel

if TYPE_CHECKING:
    from raycore.parts.transfers.config.ec_transfer import ECTransferConfig
    from raycore.parts.transfers.connectors.embeddings import EmbeddingStore
    from raycore.sampling.processor_batch import ProcessorBatch


def make_runner(core: WorkerCore, cache: KVCacheConfig) -> ModelRunner:
    """Allocate the KV cache, and return what runs steps with it."""
    setup, model, groups = core.setup, core.model, core.groups
    config = setup.config
    max_seqs, max_model_len = config.scheduler.max_num_seqs, config.scheduler.max_model_len
    has_graphs = setup.has_graphs and not any(acts() for acts in core.hooks.acts_in_layers)
    sizes = decode_sizes(max_seqs) if has_graphs else []
    max_rows = max([max_seqs, *sizes])
    features = _make_features(setup)
    host = SlotBatch(max_seqs, max_model_len, config.tokens_per_block, cache.layout.num_groups, features)
    batch = DeviceBatch(host, setup.device, decode_sizes=sizes)
    attention, followers = _make_attention(core, cache, max_rows, host)
    rows = groups.rows
    head, drafting = _make_head(core, batch, rows, cache.num_blocks, max_rows)
    runner = ModelRunner(
        model.network,
        attention,
        batch,
        _make_source(core, batch, rows),
        head,
        drafting,
        threads=model.threads,
        rows=rows,
        execution=_make_execution(core, attention, has_graphs=bool(sizes)),
        parts=[
            *map(PlanFollower, followers),
            *_adapted_rows(core, batch, rows),
            *_returned_tokens(core, batch, drafting),
            *(part for runner_parts in core.hooks.runner_parts for part in runner_parts()),
        ],
    )
    if groups.experts is not None:
        runner.share_experts(groups.experts)
    return runner


def _make_source(core: WorkerCore, batch: DeviceBatch, rows: StepRows) -> Source:
    """Return where the stage's inputs come from."""
    link, network = core.groups.source, core.model.network
    if core.rank.pp_rank > 0:
        assert link is not None, "stages are linked"
        return StageBefore(link, rows, network)
    images = _make_images(core.setup, core.model, core.groups)
    return Tokens(batch, rows) if images is None else TokensWithImages(images, batch, network, core.model.threads, rows)


def _make_head(
    core: WorkerCore, batch: DeviceBatch, rows: StepRows, num_blocks: int, max_rows: int
) -> tuple[Head, Drafting]:
    """Return what the stage does with its final hidden states, and what drafts tokens with its sampler."""
    setup, model, groups, rank = core.setup, core.model, core.groups, core.rank
    config, links = setup.config, groups.token_links
    sources = [] if groups.source is None else [groups.source]
    if not rank.is_last_stage:
        assert groups.sink is not None, "stages are linked"
        followed = Followed(model.network, batch, rows, sources, groups.sink)
        return NextStage(groups.sink), model.drafting.make_follower(followed)
    for head in (head for heads in core.hooks.heads for head in heads(batch)):
        return head, NO_DRAFTER
    sampler = Sampler(
        config.model.spec.vocab_size,
        setup.backend.sampling(),
        grammars=core.grammars,
        logprobs_mode=config.model.logprobs_mode,
        batch_invariant=config.model.batch_invariant,
        processors=_make_processors(setup) if config.has_logits_processors else None,
    )
    agree = also_sent(links, rows.of_first) if links else rows.of_first
    head = SamplingHead(model.network, batch, sampler, rows, reports=rank.reports_steps, agree=agree)
    drafted = Drafted(model.network, batch, rows, sampler, model.threads, num_blocks, max_rows, links, sources)
    return head, model.drafting.make_drafter(drafted)


def _make_processors(setup: WorkerSetup) -> ProcessorBatch:
    """Make users' logits processors. Raises InvalidConfig if one can't be imported, or its constructor fails."""
    # imported lazily: few engines have any
    from raycore.sampling.processor_batch import ProcessorBatch
    from raycore.sampling.processor_config import LogitsProcessorConfig

    classes = processor_classes(setup.config.plugins, setup.config.logits_processors)
    config, device = LogitsProcessorConfig.of(setup.config, setup.dtype), setup.device
    try:
        return ProcessorBatch(lambda: [each(config, device, device.type == "cuda") for each in classes])
    except Exception as error:  # users' code may raise anything
        names = ", ".join(f"{each.__module__}.{each.__qualname__}" for each in classes)
        raise InvalidConfig(f"the logits processors {names} failed: {type(error).__name__}: {error}") from error


def _make_features(setup: WorkerSetup) -> SlotFeatures | None:
    """Return what knows where requests have images or embeddings."""
    spec = setup.config.model.spec
    if setup.config.encoder_limits is None:
        return None
    has_axes = any(rotation is not None and rotation.sections for rotation in spec.rotations)
    return SlotFeatures(spec.vision, setup.config.scheduler.max_num_seqs, has_axes=has_axes)


def _make_images(setup: WorkerSetup, model: WorkerModel, groups: WorkerGroups) -> StepImages | None:
    """Return what encodes images, or keeps the embeddings of prompts, on the first stage."""
    spec, built = setup.config.model.spec, model.tower
    vision = spec.vision
    if setup.config.model.enable_prompt_embeds and setup.share.has_embedding:
        from raycore.runner.prompt_embeddings import PromptEmbeddings  # imported lazily: few engines need it

        multiplier = spec.embedding_multiplier if spec.scales_given_embeddings else 1.0
        return PromptEmbeddings(multiplier, setup.dtype, setup.device)
    if vision is None or built is None:
        return None
    from raycore.parts.images.vision.images import Images  # imported lazily: most models have none

    store = None if setup.config.ec_transfer_config is None else _make_store(setup, setup.config.ec_transfer_config)
    return Images(vision, built.tower, built.num_weights, setup.dtype, setup.device, store, groups.ranks)


def _make_store(setup: WorkerSetup, config: ECTransferConfig) -> EmbeddingStore:
    """Return where embeddings of images are kept besides."""
    from raycore.parts.transfers.connectors.embeddings import store_class  # imported lazily: few engines need it

    rank = setup.rank
    return store_class(config)(config, embeddings_of(setup), writes_files=rank.tp_rank == rank.pcp_rank == 0)


def _make_attention(
    core: WorkerCore, cache: KVCacheConfig, max_rows: int, host: SlotBatch
) -> tuple[Attention, Sequence[FollowsPlans]]:
    """Return what computes the part of the stage's layers that mixes tokens, and what of it follows plans."""
    states = make_state_layers(core.setup, core.model.network)
    attention: Attention
    if not core.setup.stage.layers:
        attention = NoAttention()
    elif core.setup.config.model.spec.encoder is None:
        attention = _grouped_attention(core, states, cache, max_rows)
    else:
        attention = _encoder_attention(core.setup, host)
    if core.rank.pcp_size > 1:
        attention = GatheredRowsAttention(attention, core.groups.rows)
    attention, followers = core.model.network.around(attention)
    return attention, followers if states is None else [states, *followers]


def _grouped_attention(
    core: WorkerCore, states: StateLayers[Any] | None, cache: KVCacheConfig, max_rows: int
) -> Attention:
    """Return what computes each layer of the stage: attention, `states`, or nothing."""
    spec, stage_layers = core.setup.config.model.spec, list(core.setup.stage.layers)
    with_blocks = [layer for layer in stage_layers if spec.mixers[layer].cached_numbers(spec, 1)]
    if with_blocks == stage_layers and states is None:
        return _plain_attention(core, stage_layers, cache, max_rows, ())
    first = core.setup.stage.layers.start
    places = dict.fromkeys(range(len(stage_layers)), LayerPlace(NoAttention(), 0))
    if with_blocks:
        attention = _plain_attention(core, with_blocks, cache, max_rows, () if states is None else states.states_LR)
        places |= {layer - first: LayerPlace(attention, index) for index, layer in enumerate(with_blocks)}
    if states is not None:
        with_states = [layer for layer in stage_layers if spec.mixers[layer].keeps_state]
        # as `PartPlace.state_index` says
        behind = [spec.num_layers if layer in with_blocks else 0 for layer in with_states]
        places |= {
            layer - first + offset: LayerPlace(states, index)
            for index, (layer, offset) in enumerate(zip(with_states, behind, strict=True))
        }
    return GroupedAttention(places)


def _encoder_attention(setup: WorkerSetup, host: SlotBatch) -> Attention:
    """Return attention of an encoder, which has no cache."""
    # imported lazily: decoders don't need it
    from raycore.encoder.attention import EncoderHeads, make_attention
    from raycore.parts.pooling.runner import seen_tokens

    config = setup.config
    heads = EncoderHeads.of(
        config.model.spec, setup.rank.tp_size, config.scheduler.max_model_len, setup.dtype, setup.device
    )
    is_native = setup.backend.attention_by == "native"
    num_seen = seen_tokens(config.model.spec.pooling, host)
    return make_attention(heads, is_native=is_native, batch_invariant=config.model.batch_invariant, num_seen=num_seen)


def _make_execution(core: WorkerCore, attention: Attention, *, has_graphs: bool) -> StepExecution:
    """Return how layers are run: with recordings if they only call native kernels, and don't wait for others."""
    model = core.model
    if has_graphs:
        return GraphedSteps(DecodeGraphs(CudaCapture()), None if model.adapters is None else model.adapters.rows)
    is_plain = model.network.can_record_layers and model.adapters is None and core.groups.ranks.size == 1
    return RecordedLayers(attention) if is_plain and isinstance(attention, NativeAttention) else BY_OPERATION


def _plain_attention(
    core: WorkerCore, layers: list[int], cache: KVCacheConfig, max_rows: int, states: Sequence[Tensor]
) -> Attention:
    """Return attention of these layers of the model, which are all of the stage's that have it.

    `states`: the memory of its other layers.
    """
    setup, stage = core.setup, core.setup.stage.layers
    spec = setup.config.model.spec
    kept = WorkerCacheSpec(layer_cache_specs(setup, stage), stage.start)
    own_pages = cache.layout.pages(kept)
    pages = CachePages(
        {layer - stage.start: own_pages[spec.mixers[layer].kept_by(layer) - stage.start] for layer in layers},
        cache.num_blocks,
        setup.config.cache.block_size,
        setup.backend.cache_dtype,
        setup.device,
        cache.layout.pages_beside(kept),
    )
    core.model.copies = WeightCopies()
    kinds: dict[int, list[int]] = {}
    for layer in layers:
        kinds.setdefault(spec.attention_by_layer[layer].kind, []).append(layer)
    places: dict[int, LayerPlace] = {}
    for alike in kinds.values():
        attention = _alike_attention(core, alike, cache, max_rows, pages)
        places |= {layer: LayerPlace(attention, index) for index, layer in enumerate(alike)}
    attention = places[layers[0]].attention
    if len(kinds) > 1:
        attention = GroupedAttention({index: places[layer] for index, layer in enumerate(layers)})
    for around_attention in core.hooks.around_attention:
        attention = around_attention(attention, pages.blocks, cache.num_blocks, states)
    return attention


def _alike_attention(
    core: WorkerCore, layers: list[int], cache: KVCacheConfig, max_rows: int, pages: CachePages
) -> Attention:
    """Return attention of these layers of the model, which have the same heads."""
    setup, model, groups = core.setup, core.model, core.groups
    scheduler, indexes = setup.config.scheduler, [layer - setup.stage.layers.start for layer in layers]
    kept_by = [setup.config.model.spec.mixers[layer].kept_by(layer) for layer in layers]
    spec = AttentionSpec.of(
        setup.config.model.spec,
        setup.rank.tp_size,
        [model.network.constants[index] for index in indexes],
        scheduler.max_model_len,
        setup.dtype,
        setup.device,
        layers,
        model.copies,
    )
    return setup.backend.attention(
        spec,
        pages.of_layers(spec.heads, indexes),
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_rows=max_rows,
        groups=[[index for index, kept in enumerate(kept_by) if kept in group.layers] for group in cache.layout.groups],
        blocks_in_pages=[pages.blocks_in_page(spec.heads, index) for index in indexes],
        context=groups.context,
    )


def _adapted_rows(core: WorkerCore, batch: DeviceBatch, rows: StepRows) -> list[RunnerPart]:
    adapters = core.model.adapters
    return [] if adapters is None else [AdaptedRows(adapters.rows, batch, rows)]


def _returned_tokens(core: WorkerCore, batch: DeviceBatch, drafting: Drafting) -> list[RunnerPart]:
    links, setup = core.groups.token_links, core.setup
    # no token follows the prompts of a model that pools
    if setup.rank.is_last_stage or setup.config.model.spec.pooling is not None:
        return []
    drafts: dict[str, Any] = {
        "on_host": setup.config.workers_draft,
        "max_drafts": setup.config.max_drafts,
        "take_drafts": drafting.store,
    }
    return [ReturnedTokens(TokenReceiver(link, batch, setup.most_steps_in_flight, **drafts)) for link in links]
