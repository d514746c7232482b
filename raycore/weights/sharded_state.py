"""Reads and writes one worker's weights of a decoder in files of its own. See `raycore.checkpoint.sharded_state`."""

# safetensors is partially typed:
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from raycore.checkpoint.sharded_state import METADATA_KEY, Division, ShardFile, ShardPaths, read_shard_file
from raycore.checkpoint.stages import Stage
from raycore.checkpoint.weight_files import read_headers
from raycore.errors import InvalidCheckpoint
from raycore.models.spec import ModelSpec
from raycore.weights.checkpoint_reader import READABLE, CheckpointReader
from raycore.weights.fill import store
from raycore.weights.integer_weight import IntegerWeight
from raycore.weights.loader import (
    DecoderWeights,
    Progress,
    empty_decoder_weights,
    one_thread_per_operation,
)
from raycore.weights.named import named_weights
from raycore.weights.share import WeightShare
from raycore.weights.staging import NUM_READERS, Staging
from raycore.weights.weight import Weight


def save_decoder_weights(
    weights: DecoderWeights,
    spec: ModelSpec,
    division: Division,
    files: ShardPaths,
    max_bytes: int | None,
) -> list[Path]:
    """Write a worker's weights, which may not be in fp8. Returns the files' paths.

    Args:
        max_bytes: a file with more than one tensor has at most so many bytes of tensors. None: there is one file.
    """
    first_layer = sum(division.stage_layers[: files.shard.stage])
    parts = _divide(weights, first_layer, max_bytes)
    described = msgspec.structs.replace(spec, fitted_to=None)  # it wasn't compared with these files
    metadata = {METADATA_KEY: msgspec.json.encode(ShardFile(described, division, files.shard, len(parts))).decode()}
    paths: list[Path] = []
    for number, part in enumerate(parts):
        path = files.of(number)
        # under another name first, so that nobody reads half a file
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file({name: tensor.cpu() for name, tensor in part.items()}, unfinished, metadata)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        paths.append(path)
    return paths


def load_saved_weights(share: WeightShare, files: ShardPaths, progress: Progress | None = None) -> DecoderWeights:
    """Read the weights of a share that was written, converted to the share's data type, to its device.

    Weights that get another format are quantized while they are read. `progress` is called after each tensor. An
    embedding that only a head reads (`WeightShare.embeds`) is that in the first stage's files.

    Raises:
        InvalidCheckpoint: a file or a tensor is missing or damaged, or has another shape.
    """
    saved = read_shard_file(files.of(0))
    if saved.shard != files.shard:
        raise InvalidCheckpoint(f"{files.of(0)} is the file of {saved.shard}, not of {files.shard}: was it renamed?")
    weights = empty_decoder_weights(replace(share, embeds=False))
    staging = None if share.device.type == "cpu" else Staging(share.device)
    parts = [files.of(part) for part in range(saved.num_parts)]
    with CheckpointReader(files.directory, read_headers(parts)) as reader, one_thread_per_operation() as num_usual:

        def fill(named: tuple[str, Weight]) -> None:
            name, out = named
            if not out.numel():
                return
            view = reader.view(name, tuple(out.shape), (slice(None),) * len(out.shape), READABLE)
            if staging is None:
                store(out, view, None)
            else:
                staging.send(view, lambda rows, numbers: store(out[rows], numbers, None))

        all_named = list(named_weights(weights, share.layers.start))
        with ThreadPoolExecutor(num_usual if staging is None else NUM_READERS) as pool:
            for num_done, _ in enumerate(pool.map(fill, all_named), start=1):
                if progress is not None:
                    progress(num_done, len(all_named))
    if staging is not None:
        staging.finish()
    if weights.embed_VD is None and share.has_embedding:
        weights.embed_VD = weights.lm_head_VD if share.spec.tie_word_embeddings else _load_embedding(share, files)
    return weights


def _load_embedding(share: WeightShare, files: ShardPaths) -> Tensor | IntegerWeight | None:
    first = Stage(range(0), is_first=True, is_last=False)
    spec = msgspec.structs.replace(share.spec, vision=None)
    of_first = files._replace(shard=files.shard._replace(stage=0))
    return load_saved_weights(replace(share, spec=spec, stage=first, embeds=False), of_first).embed_VD


def _divide(weights: DecoderWeights, first_layer: int, max_bytes: int | None) -> list[dict[str, torch.Tensor]]:
    parts: list[dict[str, torch.Tensor]] = [{}]
    num_bytes = 0
    for name, tensor in named_weights(weights, first_layer):
        assert isinstance(tensor, torch.Tensor), "quantized weights aren't written"
        if max_bytes is not None and parts[-1] and num_bytes + tensor.nbytes > max_bytes:
            parts.append({})
            num_bytes = 0
        parts[-1][name] = tensor
        num_bytes += tensor.nbytes
    return parts
