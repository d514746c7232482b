"""Weights as an engine's workers hold them: each worker's share in files of its own. Does not import torch.

`raycore.weights.sharded_state` reads and writes the tensors. Each file's metadata describes the model and its
division, so that files aren't read by workers that they don't fit.
"""

from __future__ import annotations

import shutil
import string
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from raycore.checkpoint.weight_files import WEIGHT_SUFFIXES, read_header
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.models.spec import ModelSpec

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
STAGES_PATTERN = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"
"""The patterns of vLLM."""
METADATA_KEY = "raycore"
_INDEX_SUFFIX = ".index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_SIZES = (
    *("architecture", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"),
    *("vocab_size", "qk_norm", "sinks", "attention_gate", "state", "latent", "indexer", "moe"),
    *("is_gated", "parts_alone", "norm", "dense", "layer_heads", "value_dim", "closings", "layer_inputs"),
)
"""The fields of a `ModelSpec` that the weights depend on, and that config.json decides."""
_DECIDED = ("qkv_bias", "o_bias", "mlp_bias", "tie_word_embeddings")
"""The fields that the weights decide. The files say what `fit_model` found before they were written."""


class Division(msgspec.Struct, frozen=True):
    """How a model's weights are divided over workers."""

    tensor_parallel_size: int
    expert_parallel_size: int = 1
    """Number of workers that whole experts are spread over. 1: each worker has a part of every expert."""
    stage_layers: list[int] = []
    """Number of layers of each stage. A single stage doesn't need it."""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return max(1, len(self.stage_layers))

    @property
    def num_ranks(self) -> int:
        """Number of different shares of a stage's weights."""
        return max(self.tensor_parallel_size, self.expert_parallel_size)

    @property
    def pattern(self) -> str:
        """The default pattern of files' names."""
        return PATTERN if self.num_stages == 1 else STAGES_PATTERN

    def __str__(self) -> str:
        experts = f", whole experts on {self.expert_parallel_size} workers" if self.expert_parallel_size > 1 else ""
        stages = f", pipeline_layers={','.join(map(str, self.stage_layers))}" if self.num_stages > 1 else ""
        return f"tensor_parallel_size={self.tensor_parallel_size}{experts}{stages}"


class Shard(NamedTuple):
    """Which share of the weights a worker has."""

    rank: int
    """From 0 to `Division.num_ranks - 1`."""
    stage: int = 0


class ShardPaths(NamedTuple):
    """Where the files of a share are."""

    directory: Path
    pattern: str
    shard: Shard

    def of(self, part: int) -> Path:
        """The path of one file."""
        rank, stage = self.shard
        return self.directory / self.pattern.format(rank=rank, tp_rank=rank, pp_rank=stage, part=part)


class ShardFile(msgspec.Struct, frozen=True):
    """The description of one file, in its metadata."""

    spec: ModelSpec
    division: Division
    shard: Shard
    num_parts: int
    """Number of files of this share."""


def checked_pattern(pattern: str | None, division: Division) -> str:
    """Return the pattern of files' names. None: the default.

    Raises:
        InvalidConfig: several files would have the same name, or the pattern is no file name.
    """
    if pattern is None:
        return division.pattern
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(pattern) if field is not None}
    except (ValueError, TypeError) as error:
        raise InvalidConfig(f"pattern={pattern!r} isn't a pattern such as {division.pattern!r}: {error}") from None
    if fields - {"rank", "tp_rank", "pp_rank", "part"} or "part" not in fields:
        raise InvalidConfig(
            f"pattern={pattern!r} needs {{part}}, and may have {{rank}} or {{tp_rank}}, {{pp_rank}}, and no others"
        )
    if division.num_ranks > 1 and not fields & {"rank", "tp_rank"}:
        raise InvalidConfig(f"pattern={pattern!r} needs {{rank}}, because {division.num_ranks} workers write files")
    if division.num_stages > 1 and "pp_rank" not in fields:
        raise InvalidConfig(f"pattern={pattern!r} needs {{pp_rank}}, because {division.num_stages} stages write files")
    if "/" in pattern or not pattern.endswith(".safetensors"):
        raise InvalidConfig(f"pattern={pattern!r} isn't the name of a file that ends in .safetensors")
    return pattern


def read_shard_file(path: Path) -> ShardFile:
    """Read the description of a file.

    Raises:
        InvalidCheckpoint: the file is missing or damaged, or raycore hasn't written it.
    """
    from safetensors import SafetensorError, safe_open  # imported lazily: most engines don't need it here

    if not path.is_file():
        found = ", ".join(sorted(each.name for each in path.parent.glob("*.safetensors"))) or "no *.safetensors files"
        raise InvalidCheckpoint(
            f"load_format='sharded_state': {path} doesn't exist; found {found}. save_sharded_state() writes such files"
        )
    try:
        opened: Any = safe_open(path, framework="numpy")  # has no type annotations
        with opened as file:
            metadata: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InvalidCheckpoint(f"{path} can't be read: {error}") from error
    try:
        return msgspec.json.decode(metadata.get(METADATA_KEY, ""), type=ShardFile)
    except msgspec.DecodeError as error:
        raise InvalidCheckpoint(
            f"load_format='sharded_state': raycore hasn't written {path}, or another version has. Write it again with "
            "save_sharded_state()"
        ) from error


def check_saved_state(path: Path, pattern: str, spec: ModelSpec, division: Division) -> ModelSpec:
    """Check that the files at `path` are those of this model, divided like this. Reads only headers.

    Returns: `spec`, except that the files decide whether there are a head and biases.

    Raises:
        InvalidCheckpoint: they are of another model, or damaged.
        InvalidConfig: they are divided differently.
    """
    saved = read_shard_file(ShardPaths(path, pattern, Shard(0)).of(0))
    differences = [
        f"{name}={getattr(saved.spec, name)!r} instead of {getattr(spec, name)!r}"
        for name in _SIZES
        if getattr(saved.spec, name) != getattr(spec, name)
    ]
    if differences:
        raise InvalidCheckpoint(
            f"load_format='sharded_state': the files in {path} are of another model than its config.json: "
            f"they have {', '.join(differences)}"
        )
    if saved.division != division:
        raise InvalidConfig(
            f"load_format='sharded_state': the files in {path} were saved with {saved.division}, and this engine has "
            f"{division}: use the same sizes, or load the original checkpoint"
        )
    for file in sorted(path.glob("*.safetensors")):  # those of other workers may be on other nodes
        read_header(file)
    return msgspec.structs.replace(spec, **{name: getattr(saved.spec, name) for name in _DECIDED})


def copy_other_files(model: Path, tokenizer: Path, directory: Path) -> None:
    """Copy a checkpoint's files other than weights to `directory`, and the tokenizer's if it is another one."""
    others = [path for path in model.iterdir() if path.is_file() and not _has_weights(path)]
    if tokenizer != model:
        others = [path for path in others if path.name not in _TOKENIZER_FILES]
        others += [tokenizer / name for name in _TOKENIZER_FILES if (tokenizer / name).is_file()]
    for path in others:
        if not (directory / path.name).exists() or not path.samefile(directory / path.name):
            shutil.copyfile(path, directory / path.name)


def _has_weights(path: Path) -> bool:
    return path.suffix in WEIGHT_SUFFIXES or path.name.endswith(_INDEX_SUFFIX)
