"""KV caches for tests."""

from raycore.cache_layout import KVCacheConfig
from raycore.worker.worker import Worker


def cache_of(worker: Worker, num_blocks: int) -> KVCacheConfig:
    """The cache that an engine would choose for this worker's model, with so many blocks."""
    return KVCacheConfig(num_blocks, worker._core.sizes.layout)
