"""What a worker's layers keep of requests' tokens, and how a model's layers are divided into groups for that."""

from __future__ import annotations

from raycore.attention.paged_cache import bytes_per_block
from raycore.cache_layout import CacheLayout, LayerCacheSpec, WorkerCacheSpec, divide_layers
from raycore.worker.setup import WorkerSetup
from raycore.worker.states import row_bytes


def layer_cache_specs(setup: WorkerSetup, layers: range) -> tuple[LayerCacheSpec, ...]:
    """Return what each of these layers of the model keeps on this worker, if it computes it."""
    spec = setup.config.model.spec
    block_size, dtype = setup.config.cache.block_size, setup.backend.cache_dtype

    def of_layer(layer: int) -> LayerCacheSpec:
        mixer = spec.mixers[layer]
        kind, window = mixer.cached(spec, layer)
        heads = spec.attention_by_layer[layer].heads(spec, setup.rank.tp_size)
        num_bytes = 0 if kind == "none" else bytes_per_block(heads, 1, block_size, dtype)
        return LayerCacheSpec(kind, num_bytes, window, mixer.cached_beside(spec) * block_size * dtype.itemsize)

    return tuple(map(of_layer, layers))


def worker_cache_spec(setup: WorkerSetup, draft_bytes: int) -> WorkerCacheSpec:
    """Return what the worker keeps. `draft_bytes`: those of a block of what drafts."""
    layers = setup.stage.layers
    return WorkerCacheSpec(layer_cache_specs(setup, layers), layers.start, draft_bytes, row_bytes(setup))


def expected_layout(setup: WorkerSetup) -> CacheLayout:
    """Return the layout that the engine will choose, as far as one worker can know it."""
    layers = range(setup.config.model.spec.num_layers)
    return divide_layers(layer_cache_specs(setup, layers), setup.config.cache_limits)
