"""What the bytes mean that a worker keeps elsewhere, as a text that is another one where they would be others.

These are the workers' parts of keys. The names of blocks and images have the rest: see
`raycore.parts.transfers.connectors.identity`.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec
import torch

from raycore.cache_layout import CacheLayout
from raycore.parts.images.checkpoint.vision_tensors import divides
from raycore.worker.setup import WorkerSetup


def layout_of(setup: WorkerSetup, cache: CacheLayout) -> str:
    """Return a text that is the same for workers whose blocks have the same bytes for the same tokens."""
    config, rank = setup.config, setup.rank
    spec, max_length = config.model.spec, config.scheduler.max_model_len
    scalings = [None if rotation is None else rotation.scaling for rotation in spec.rotations]
    parts = (
        spec,
        _numbers(setup),
        str(setup.backend.cache_dtype),
        config.cache.block_size,
        (rank.tp_rank, rank.tp_size, rank.pp_rank, rank.pp_size, rank.context_rank, rank.context_size),
        list(setup.stage.layers),
        [scaling is not None and scaling.is_long(max_length) for scaling in scalings],
        max_length if spec.implementation == "transformers" else None,  # its rotations may depend on it, too
        *(() if cache.keeps_all_in_one_group else (cache.groups,)),
    )
    return _digest(parts)


def embeddings_of(setup: WorkerSetup) -> str:
    """Return a text that is the same for workers whose embeddings of an image have the same bytes. Logs show it.

    How many ranks divide the encoder decides the last bits, as they sum in another order.
    """
    vision, size = setup.config.model.spec.vision, setup.rank.tp_size
    numbers = ", ".join(map(str, _numbers(setup)))
    if setup.config.model.batch_invariant and vision is not None and divides(vision, size):
        numbers += f", tensor_parallel_size {size}"
    return f"encoder {_digest(vision)}, {numbers}"


def _numbers(setup: WorkerSetup) -> tuple[object, ...]:
    """What decides how numbers are rounded: where bits count, also what computes them."""
    if not setup.config.model.batch_invariant:
        return (setup.dtype_name,)
    computation = setup.computation
    return (
        setup.dtype_name,
        computation.backend,
        computation.parts_by_torch,
        setup.backend.attention_by,
        str(torch.__version__),
        setup.device.type,
    )


def _digest(parts: object) -> str:
    return blake2b(msgspec.msgpack.encode(parts), digest_size=16).hexdigest()
