"""Where a worker's weights come from, and where they are saved."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from raycore.checkpoint.gguf.header import is_gguf
from raycore.checkpoint.hub_download import complete_snapshot
from raycore.checkpoint.sharded_state import Shard, ShardPaths, check_saved_state, checked_pattern, copy_other_files
from raycore.checkpoint.weight_files import stored_tensors
from raycore.errors import InvalidConfig
from raycore.weights.kept_types import describe_types
from raycore.weights.linear_formats import CONVERTED
from raycore.weights.loader import (
    DecoderWeights,
    Progress,
    empty_decoder_weights,
    load_decoder_weights,
    random_decoder_weights,
)
from raycore.weights.offload import tensors_of
from raycore.weights.sharded_state import load_saved_weights, save_decoder_weights
from raycore.weights.share import WeightShare
from raycore.worker.setup import WorkerSetup

logger = logging.getLogger(__name__)


def read_weights(setup: WorkerSetup, share: WeightShare, progress: Progress | None = None) -> DecoderWeights:
    """Read or generate weights, as `load_format` says.

    A model that transformers' code computes has its network instead, with all its weights, and an encoder has
    `EncoderWeights`.

    Args:
        share: the worker's share, which may be read to another device, in other formats.
        progress: called after each tensor.

    Raises:
        InvalidCheckpoint: a file or a tensor is missing or damaged, or can't be downloaded.
    """
    model, path = setup.config.model, Path(setup.config.model.model)
    if model.load_format == "auto":
        complete_snapshot(path)
    if model.spec.implementation == "transformers":
        # imports transformers, an optional dependency
        from raycore.fallback.networks import load_network

        return load_network(path, setup.dtype, model.seed if model.load_format == "dummy" else None)
    if model.spec.encoder is not None:
        return _encoder_weights(setup, share, progress)
    if model.load_format == "dummy":
        # on another kind of device, they would be others
        return random_decoder_weights(replace(share, device=setup.device), model.seed)
    if model.load_format == "sharded_state":
        pattern = setup.config.shard_pattern
        # once more, because scale() may have changed the number of workers that share experts
        spec = check_saved_state(path, pattern, model.spec, setup.config.division)
        return load_saved_weights(replace(share, spec=spec), ShardPaths(path, pattern, shard_of(setup)), progress)
    return load_decoder_weights(share, path, progress)


def describe_stored(setup: WorkerSetup) -> str:
    """Return which quantized weights of a GGUF file the worker keeps as they are. Empty for other checkpoints."""
    model = setup.config.model
    path = Path(model.model)
    if not is_gguf(path) or model.load_format != "auto" or model.spec.implementation == "transformers":
        return ""
    return describe_types(setup.share, stored_tensors(path))


def unread_weights(setup: WorkerSetup) -> Any:
    """Return weights of the worker's share that are zero, or random, for an update that brings all of them."""
    model = setup.config.model
    if model.spec.implementation == "transformers" or model.spec.encoder is not None:
        # networks of transformers are tested when they are built, and encoders are small
        dummy = msgspec.structs.replace(model, load_format="dummy")
        return read_weights(replace(setup, config=msgspec.structs.replace(setup.config, model=dummy)), setup.share)
    weights = empty_decoder_weights(setup.share)
    for tensor in tensors_of(weights, setup.device):
        tensor.zero_()  # what is in new memory may be no numbers, with which no step can be warmed up
    return weights


def _encoder_weights(setup: WorkerSetup, share: WeightShare, progress: Progress | None) -> Any:
    # imported lazily: decoders don't need it
    from raycore.encoder.weights import load_encoder_weights, random_encoder_weights

    model = setup.config.model
    if model.load_format == "dummy":
        return random_encoder_weights(replace(share, device=setup.device), model.seed)
    return load_encoder_weights(share, Path(model.model), progress)


def save_weights(setup: WorkerSetup, directory: Path, pattern: str | None, max_bytes: int | None) -> list[Path]:
    """Write a worker's share, for `load_format="sharded_state"`. Returns the paths of the files with weights.

    The weights are read again, because layers keep them in other forms. The worker that writes the first share also
    copies the checkpoint's other files.

    Args:
        pattern: the files' names. None: the default.
        max_bytes: the size at which another file is begun. None: one file.

    Raises:
        InvalidConfig: the pattern can't be used, or the checkpoint's weights are quantized.
        OSError: a file can't be written.
    """
    model, division, shard = setup.config.model, setup.config.division, shard_of(setup)
    if model.spec.quantization is not None:
        raise InvalidConfig(f"{model.model} has quantized weights, which save_sharded_state() can't write")
    if is_gguf(Path(model.model)):
        raise InvalidConfig(f"save_sharded_state() can't write {model.model}, a GGUF file, which has no config.json")
    if model.spec.encoder is not None:
        raise InvalidConfig(f"save_sharded_state() can't write {model.model}, an encoder ({model.spec.architecture})")
    if model.spec.pooling is not None:
        raise InvalidConfig(f"save_sharded_state() can't write {model.model}, a model that pools")
    if model.spec.implementation == "transformers":
        raise InvalidConfig(f"save_sharded_state() can't write {model.model}, which transformers' code computes")
    files = ShardPaths(directory, checked_pattern(pattern, division), shard)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(
            f"save_sharded_state(): {directory} can't be made on a worker's node: {error.strerror}"
        ) from error
    # the first stage's files have the embedding that a head of the last one reads
    own = replace(setup.share, device=torch.device("cpu"), formats=CONVERTED, embeds=False)
    weights = read_weights(setup, own)
    paths = save_decoder_weights(weights, model.spec, division, files, max_bytes)
    if shard == Shard(0):
        copy_other_files(Path(model.model), Path(model.tokenizer), directory)
    return paths


def shard_of(setup: WorkerSetup) -> Shard:
    """Return which share of the weights a worker has, among all different ones."""
    rank = setup.rank
    return Shard(rank.ep_rank if setup.config.parallel.enable_expert_parallel else rank.tp_rank, rank.pp_rank)
