"""What sentence-transformers' files in a checkpoint's directory say of pooling. Does not import torch.

`modules.json` lists the modules that a text goes through: the transformer, pooling, perhaps linear layers and
normalization. Each has a folder with its config.json, and with its weights, if it has some. Prompts, which some
checkpoints want before a text, are the caller's matter: `read_prompts` reads them.
"""

from __future__ import annotations

__all__ = ["MODULES_FILE", "SentenceFiles", "max_sequence_length", "read_modules", "read_prompts"]

from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from raycore.checkpoint.weight_files import SINGLE_FILE, read_header
from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields
from raycore.parts.pooling.models.pooling import (
    ActivationName,
    HeadActivation,
    HeadLinear,
    HeadNorm,
    HeadPart,
    SentenceModules,
    SequencePooling,
)

MODULES_FILE = "modules.json"
_POOLINGS: dict[str, SequencePooling] = {"cls_token": "CLS", "mean_tokens": "MEAN", "lasttoken": "LAST"}
_NAMED_POOLINGS: dict[str, SequencePooling] = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
_ACTIVATIONS: dict[str, ActivationName | None] = {
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
"""By the names of torch's modules."""
_LINEAR_NAMES = ("linear.weight", "dense.weight", "weight")


class SentenceFiles(NamedTuple):
    """Those of the checkpoint in a directory. Implements `PoolingFiles`."""

    path: Path

    def modules(self) -> SentenceModules | None:
        return read_modules(self.path)

    def max_length(self) -> int | None:
        return max_sequence_length(self.path)


def read_modules(path: Path) -> SentenceModules | None:
    """Read the modules of the checkpoint in the directory `path`. None: there is no `modules.json`.

    Raises:
        InvalidCheckpoint: a file is damaged, or there is a module that raycore doesn't know.
    """
    file = path / MODULES_FILE
    if not file.is_file():
        return None
    pooling: SequencePooling | None = None
    head: list[HeadPart] = []
    is_normalized, size = False, None
    for kind, folder in _modules(file):
        if kind == "Pooling":
            pooling = _pooling(JsonFields.read(path / folder / "config.json"))
        elif kind == "Dense":
            parts = _dense(path, folder)
            head += parts
            size = parts[0].num_outputs if isinstance(parts[0], HeadLinear) else size
        elif kind == "LayerNorm":
            fields = JsonFields.read(path / folder / "config.json")
            head.append(HeadNorm("norm.weight", fields.int_("dimension"), bias="norm.bias", folder=folder))
        elif kind == "Normalize":
            is_normalized = True
        elif kind not in ("Transformer", "Dropout"):
            raise InvalidCheckpoint(
                f"{file}: a module of type {kind!r} isn't supported: Transformer, Pooling, Dense, LayerNorm, Dropout "
                "and Normalize are"
            )
    return SentenceModules(pooling, head, is_normalized, size)


def max_sequence_length(path: Path) -> int | None:
    """Return the maximum number of tokens of a text in the checkpoint in the directory `path`. None: it has none."""
    for name in ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlnet_config.json"):
        if (path / name).is_file():
            return JsonFields.read(path / name).optional_int("max_seq_length")
    return None


def read_prompts(path: Path) -> dict[str, str]:
    """Return what the checkpoint in the directory `path` wants before texts, by name, such as `query`.

    They are the `task_instructions` in its config.json, else the `prompts` in sentence-transformers' file.
    """
    for name, key in (("config.json", "task_instructions"), ("config_sentence_transformers.json", "prompts")):
        found: Any = JsonFields.read(path / name).get(key) if (path / name).is_file() else None
        if found and isinstance(found, dict):
            prompts = cast("dict[str, Any]", found)
            return {each: prompt for each, prompt in prompts.items() if isinstance(prompt, str)}
    return {}


def _modules(file: Path) -> list[tuple[str, str]]:
    """Return the type and the folder of each module, in order."""
    try:
        found: Any = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidCheckpoint(f"{file} can't be read: {error}") from error
    modules = cast("list[Any]", found) if isinstance(found, list) else [None]
    named: list[tuple[str, str]] = []
    for module in modules:
        fields = JsonFields(str(file), cast("dict[str, Any]", module) if isinstance(module, dict) else {})
        kind, folder = fields.get("type"), fields.get("path")
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise InvalidCheckpoint(f"{file} isn't a list of modules, each with a 'type' and a 'path'")
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise InvalidCheckpoint(f"{file}: the path {folder!r} isn't below the checkpoint's directory")
        named.append((kind.rsplit(".", 1)[-1], folder))
    return named


def _pooling(fields: JsonFields) -> SequencePooling:
    named = fields.get("pooling_mode")
    if named is not None:
        if isinstance(named, list) and len(cast("list[Any]", named)) == 1:
            named = cast("list[Any]", named)[0]
        found = _NAMED_POOLINGS.get(named) if isinstance(named, str) else None
        if found is None:
            raise fields.error("pooling_mode", f"one of {', '.join(_NAMED_POOLINGS)}")
        return found
    prefix = "pooling_mode_"
    chosen = [key.removeprefix(prefix) for key, value in fields.values.items() if key.startswith(prefix) and value]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        asked = " and ".join(prefix + each for each in chosen) or "nothing"
        raise InvalidCheckpoint(
            f"{fields.source} asks for {asked}: expected one of {', '.join(prefix + each for each in _POOLINGS)}"
        )
    return _POOLINGS[chosen[0]]


def _dense(path: Path, folder: str) -> list[HeadPart]:
    fields, file = JsonFields.read(path / folder / "config.json"), path / folder / SINGLE_FILE
    if not file.is_file():
        raise InvalidCheckpoint(f"{path / folder} has no {SINGLE_FILE}: weights in other formats aren't read")
    if fields.bool_("use_residual"):
        raise fields.error("use_residual", "false, because residual connections aren't supported")
    stored = read_header(file)
    weight = next((name for name in _LINEAR_NAMES if name in stored), _LINEAR_NAMES[0])
    bias = weight.replace("weight", "bias") if fields.bool_("bias", default=True) else None
    linear = HeadLinear(weight, fields.int_("out_features"), fields.int_("in_features"), bias, folder)
    named = fields.get("activation_function") or "torch.nn.modules.activation.Tanh"
    name = str(named).rsplit(".", 1)[-1]
    if name not in _ACTIVATIONS:
        raise fields.error("activation_function", f"one of {', '.join(_ACTIVATIONS)} of torch.nn")
    activation = _ACTIVATIONS[name]
    return [linear] if activation is None else [linear, HeadActivation(activation)]
