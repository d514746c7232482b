"""A worker's part of the model, with what drafts for it and the adapters that change it, awake and asleep."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from raycore.attention.spec import WeightCopies
from raycore.checkpoint.stages import Stage
from raycore.class_paths import import_class
from raycore.config import ModelConfig
from raycore.decoder.decoder import Decoder
from raycore.decoder.network import Network
from raycore.layers.linear import Linear
from raycore.layers.operations import Operations, check_tiles
from raycore.layers.rows import TILE_ROWS
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.adapters.layers import Adapters, LinearKey, can_be_native
from raycore.parts.drafts.worker import make_draft_worker
from raycore.parts.experts.models import ExpertShare
from raycore.parts.experts.parallel import SplitExperts
from raycore.parts.experts.worker.exchange import WeightExchange
from raycore.parts.images.weights import VisionWeights
from raycore.parts.weights.worker.in_place import weight_tensors
from raycore.plugins import MODELS
from raycore.runner.compute_threads import ComputeThreads
from raycore.weights.loader import DecoderWeights
from raycore.weights.offload import OffloadedTensors, tensors_of
from raycore.worker.groups import WorkerGroups
from raycore.worker.setup import WorkerSetup

if TYPE_CHECKING:
    from raycore.parts.images.vision.tower import Tower
    from raycore.parts.pooling.layers.heads import Heads

logger = logging.getLogger(__name__)


class BuiltTower(NamedTuple):
    """What encodes images."""

    tower: Tower
    num_weights: int
    """Number of multiplications for one patch, without those of attention, as an upper bound."""


class _Unadapted:
    """Stands for adapters where linear layers are made that they don't change."""

    def around(self, linear: Linear, key: LinearKey, ranks: TensorParallel | None = None) -> Linear:
        """Return the linear layer."""
        return linear


class WorkerModel:
    """The networks that one worker computes. Call `build` before the network is used."""

    def __init__(self, setup: WorkerSetup, groups: WorkerGroups) -> None:
        """
        Raises:
            InvalidConfig: the draft model can't be computed with the configured attention backend or kv_cache_dtype.
        """
        self._groups = groups
        self.drafting = make_draft_worker(setup, groups.ranks, _network_class)
        self.adapters = _make_adapters(setup)
        """None without `enable_lora`."""
        self.threads = ComputeThreads()
        self.heads: Heads | None = None
        """What makes results of pooled hidden states. None: the model generates, or this worker doesn't report."""
        self.copies = WeightCopies()
        """What attention has made of the network's weights."""
        self.num_changes = 0
        """How often weights were made, were replaced, or came to be replaced later."""
        self._network: Network | None = None
        self._offloaded: OffloadedTensors | None = None
        """The weights while they are in the host's memory."""

    @property
    def network(self) -> Network:
        """The model itself."""
        assert self._network is not None, "load_model() comes first"
        return self._network

    @property
    def is_built(self) -> bool:
        """Whether there are layers. A worker that joins others with whom it shares experts gets them later."""
        return self._network is not None

    def build(self, setup: WorkerSetup, weights: DecoderWeights) -> None:
        """Make layers of weights, and load what drafts.

        Raises:
            InvalidCheckpoint: a file or a tensor of the draft model is missing or damaged.
        """
        self.num_changes += 1
        model = setup.config.model
        self._operations = operations = setup.backend.operations(has_many_rows=model.spec.encoder is not None)
        with torch.inference_mode():
            self.tower = None
            # what encoders and networks of transformers are made of knows nothing of images
            if model.spec.vision is not None and weights.vision is not None:
                vision, weights.vision = weights.vision, None
                self.tower = _build_tower(model.spec, vision, operations, self._groups.ranks)
            # a plugin's decoder may know nothing of adapters
            adapted = {} if self.adapters is None else {"adapters": self.adapters}
            self._network = _network_class(model.spec)(
                model.spec, weights, self._groups.ranks, operations, self._groups.experts, setup.stage, **adapted
            )
            depends_on_threads = (
                operations.depends_on_threads
                or setup.backend.depends_on_threads
                or any(kind.depends_on_threads for kind in model.spec.part_kinds)
                or (self.adapters is not None and not self.adapters.rows.is_native)
            )
            self.threads = ComputeThreads(setup.max_threads, is_fixed=model.batch_invariant and depends_on_threads)
            if model.batch_invariant:
                self._check_tiles(setup.device)
        self.drafting.load(self._network)
        if model.spec.pooling is not None and setup.rank.reports_steps:
            self.heads = _make_heads(model, setup.device)

    def made_like(self, setup: WorkerSetup, weights: DecoderWeights, stage: Stage, *, shortens: bool = True) -> Network:
        """Return a network of some of the stage's weights, made like that of the model. Adapters know nothing of it.

        `shortens`: whether layers may store weights in a shorter dtype, as those of the model may.
        """
        spec = setup.config.model.spec
        adapted: dict[str, Any] = {} if self.adapters is None else {"adapters": _Unadapted()}
        operations = self._operations if shortens else self._operations.unshortened()
        with torch.inference_mode():
            return _network_class(spec)(
                spec, weights, self._groups.ranks, operations, self._groups.experts, stage, **adapted
            )

    def tower_like(self, setup: WorkerSetup, weights: VisionWeights, *, shortens: bool = True) -> BuiltTower:
        """Return an encoder of images made like the one of the model. `shortens`: see `made_like`."""
        operations = self._operations if shortens else self._operations.unshortened()
        with torch.inference_mode():
            return _build_tower(setup.config.model.spec, weights, operations, self._groups.ranks)

    def weight_tensors(self) -> dict[str, torch.Tensor]:
        """Return all weights as they are in memory, by their paths in the networks."""
        return weight_tensors({"network": self.network, "tower": self.tower, "heads": self.heads})

    def _check_tiles(self, device: torch.device) -> None:
        """Test on this device whether tiles are batch-invariant, with as many threads as real steps use.

        If they aren't, log a warning. Rows are then computed one at a time.
        """
        self.threads.begin_step(TILE_ROWS, self.network.num_weights)
        if not check_tiles(self._operations, self._groups.ranks):
            logger.warning(
                "batch_invariant=True: on device %s a token's result depends on its position in a tile of %d tokens, "
                "so tokens are computed one at a time, which is slow",
                device,
                TILE_ROWS,
            )

    def exchange_experts(self, exchange: WeightExchange, before: ExpertShare | None, after: ExpertShare | None) -> None:
        """Move experts from worker to worker: from what this one holds to what it will hold."""
        assert before is not None, "only ranks that share experts are regrouped"
        assert after is not None, "only ranks that share experts are regrouped"
        with torch.inference_mode():
            exchange.exchange(self.network, after.experts)
        for layer in self.network.sparse_layers:
            layer.share_with(self._groups.experts or SplitExperts(self._groups.ranks))
            self.network.num_weights += layer.num_weights_of(len(after.experts) - len(before.experts))

    def sleep(self, level: int, device: torch.device) -> None:
        """Give up the memory of weights. Level 1 moves those on a GPU to the host's memory, level 2 drops them."""
        if level >= 2:
            if self._offloaded is not None and self.adapters is not None:
                self._offloaded.restore()  # adapters that stay are among the tensors
            self._network = self._offloaded = self.heads = None
            if self.adapters is not None:
                self.adapters.leave_layers()
            self.drafting.unload()
        elif device.type == "cuda" and self._network is not None and self._offloaded is None:
            networks = self._network, self.drafting.network, self.tower
            self._offloaded = OffloadedTensors(tensors_of(networks, device))

    def wake_up(self) -> bool:
        """Move weights back from the host's memory. Returns whether there are weights: dropped ones must be read."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
        return self._network is not None


def _make_heads(model: ModelConfig, device: torch.device) -> Heads:
    from raycore.parts.pooling.layers.heads import (  # imported lazily: models that generate don't need them
        load_heads,
        random_heads,
    )

    spec = model.spec
    assert spec.pooling is not None, "the model pools"
    if model.load_format == "dummy":
        return random_heads(spec.pooling, spec.names, model.seed, device)
    return load_heads(spec.pooling, spec.names, Path(model.model), device)


def _build_tower(
    spec: ModelSpec, weights: dict[str, torch.Tensor], operations: Operations, ranks: TensorParallel
) -> BuiltTower:
    from raycore.parts.images.vision.tower import make_tower  # imported lazily: most models have none

    assert spec.vision is not None
    num_weights = sum(each.numel() for each in weights.values() if each.dim() > 1)
    return BuiltTower(make_tower(spec.vision, weights, operations, ranks), num_weights)


def _make_adapters(setup: WorkerSetup) -> Adapters | None:
    config = setup.config
    if not config.lora.enable_lora:
        return None
    return Adapters(
        setup.device,
        config.lora.num_slots,
        is_native=setup.backend.operations_by == "native" and can_be_native(config.model.spec, setup.rank.tp_size),
        batch_invariant=config.model.batch_invariant,
    )


def _network_class(spec: ModelSpec) -> Callable[..., Network]:
    return Decoder if spec.decoder is None else import_class(f"{spec.architecture}'s decoder", spec.decoder, MODELS)
