"""Reads the description of a checkpoint's model: `config.json` and `generation_config.json`, or what a GGUF file has
instead. Doesn't import torch or read weights.
"""

from __future__ import annotations

__all__ = ["ModelImpl", "load_model_spec", "merged", "pools_by_itself", "read_config"]

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from raycore.checkpoint.gguf.config import config_json, generation_json
from raycore.checkpoint.gguf.header import is_gguf, read_gguf
from raycore.checkpoint.sentence_transformers import MODULES_FILE, SentenceFiles
from raycore.class_paths import import_class
from raycore.errors import InvalidCheckpoint, InvalidConfig
from raycore.extras import is_installed, missing_package
from raycore.json_fields import JsonFields, shortened
from raycore.models.encoders import ENCODERS, check_model_type, encoder_form, encoder_pooling
from raycore.models.family import plugin_family
from raycore.models.quantization import quantization_of
from raycore.models.registry import (
    FAMILIES,
    described,
    find_family,
    find_own_family,
    known_families,
    parse_model_spec,
    tokens_and_defaults,
)
from raycore.models.spec import ModelSpec, Roots
from raycore.parts.pooling.models.forms import PoolingChoice, decoder_pooling, pooling_form
from raycore.plugins import MODELS

ModelImpl = Literal["auto", "raycore", "transformers"]


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> JsonFields:
    """Read config.json in the checkpoint directory `path`, or what a GGUF file has instead.

    `overrides`: what counts instead of its values. Objects are merged.

    Raises:
        InvalidCheckpoint: the directory or the file is missing or can't be read.
        InvalidConfig: the package that reads a GGUF file isn't installed.
    """
    if is_gguf(path):
        config = JsonFields(f"{path} as config.json", config_json(read_gguf(path)))
        return config.converted(lambda values: merged(values, overrides)) if overrides else config
    if not (path / "config.json").exists():
        problem = "has no config.json" if path.is_dir() else "isn't a directory"
        raise InvalidCheckpoint(
            f"{path} {problem}: give the directory of a downloaded checkpoint, with its config.json and *.safetensors "
            "files, or a .gguf file"
        )
    config = _with_modelopt(JsonFields.read(path / "config.json"), path / "hf_quant_config.json")
    return config.converted(lambda values: merged(values, overrides)) if overrides else config


def _with_modelopt(config: JsonFields, file: Path) -> JsonFields:
    """Return config.json with what older versions of ModelOpt have written of quantized weights into another file."""
    if config.get("quantization_config") is not None or not file.exists():
        return config
    fields = JsonFields.read(file).child("quantization").converted(lambda own: {"quant_method": "modelopt", **own})
    if quantization_of(fields) is None:  # or an error, which names this file
        return config
    return config.converted(lambda values: {**values, "quantization_config": fields.values})


def load_model_spec(
    path: Path,
    model_impl: ModelImpl = "raycore",
    max_length: int | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    pooling: PoolingChoice | None = None,
    config_path: Path | None = None,
) -> ModelSpec:
    """Read the description of the model in the checkpoint directory `path`, or in the GGUF file `path`.

    Args:
        model_impl: the option.
        max_length: for models that transformers' code computes, the maximum number of tokens of a sequence. None: the
            model's.
        overrides: as in `read_config`.
        pooling: what the user asks of a model that pools. None: the model generates.
        config_path: another directory, whose config.json and generation_config.json count.

    Raises:
        InvalidCheckpoint: the directory or its config.json is missing or can't be read, or raycore doesn't support the
            model. For an unsupported model, the message names the file, the key and the key's value.
    """
    path = path.expanduser()
    directory = path if config_path is None else config_path.expanduser()
    config = read_config(directory, overrides)
    generation = _read_generation(directory)
    encoder = next(filter(encoder_form, map(str, config.list_("architectures") or [])), None)
    if encoder is not None:
        return _encoder_spec(encoder, path, config, generation, pooling)
    if pooling is not None:
        return _pooling_spec(path, config, generation, pooling)
    if model_impl == "raycore" or (model_impl == "auto" and find_own_family(config) is not None):
        return parse_model_spec(config, generation)
    if is_gguf(path):
        raise InvalidConfig(
            f"model_impl={model_impl!r} can't be used with {path}: transformers' code reads no GGUF files"
        )
    if overrides or directory != path:
        given = f"hf_overrides={shortened(dict(overrides))}" if overrides else f"hf_config_path={str(config_path)!r}"
        raise InvalidConfig(
            f"{given} can't be used with a model that transformers' code computes, which reads its config.json itself: "
            "omit it, or edit a copy"
        )
    return _described_by_transformers(path, config, generation, max_length)


def _read_generation(path: Path) -> JsonFields:
    if is_gguf(path):
        return JsonFields(f"{path} as generation_config.json", generation_json(read_gguf(path)))
    file = path / "generation_config.json"
    return JsonFields.read(file) if file.exists() else JsonFields(str(file), {})


def merged(values: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with those of `overrides` in place of its own. Objects in both are merged."""
    result = dict(values)
    for key, value in overrides.items():
        own = result.get(key)
        if isinstance(own, dict) and isinstance(value, Mapping):
            value = merged(cast("dict[str, Any]", own), cast("Mapping[str, Any]", value))
        result[key] = value
    return result


def pools_by_itself(path: Path, config: JsonFields) -> bool:
    """Whether the model in the checkpoint directory `path` pools unless the user asks for something else.

    An architecture that raycore has a family for generates, unless there are sentence-transformers' files.
    """
    if (path / MODULES_FILE).is_file():
        return True
    if find_family(config) is not None:
        return False
    names = list(map(str, config.list_("architectures") or []))
    forms = map(pooling_form, names)
    return any(map(encoder_form, names)) or any(form is not None and form.form != "generate" for form in forms)


def _encoder_spec(
    name: str, path: Path, config: JsonFields, generation: JsonFields, choice: PoolingChoice | None
) -> ModelSpec:
    """Return the description of an encoder, whose architecture has this name."""
    form = encoder_form(name)
    assert form is not None, "it is the name of an encoder"
    if choice is None:
        raise config.error("architectures", "a decoder, because runner='generate': encoders pool, so omit it")
    check_model_type(name, config)
    spec = described(name, form.family, config.with_defaults(form.family.defaults), generation)
    return msgspec.structs.replace(spec, pooling=encoder_pooling(spec, config, SentenceFiles(path), choice))


def _pooling_spec(path: Path, config: JsonFields, generation: JsonFields, choice: PoolingChoice) -> ModelSpec:
    """Return the description of a decoder that pools, from a checkpoint with or without a head for texts."""
    for name in map(str, config.list_("architectures") or []):
        form = pooling_form(name)
        if form is None:
            continue
        has_others = "text_config" in config and form.form != "generate"
        base = form.base.replace("ForCausalLM", "ForConditionalGeneration") if has_others else form.base
        if (FAMILIES.get(base) or plugin_family(base)) is None:
            continue
        spec = parse_model_spec(config.converted(_with_architecture(base)), generation)
        others = [spec.names.roots, *spec.names.other_roots, Roots(), Roots("", spec.names.roots.head)]
        names = msgspec.structs.replace(spec.names, other_roots=list(dict.fromkeys(others))[1:])
        spec = msgspec.structs.replace(spec, architecture=name, names=names)
        return msgspec.structs.replace(
            spec, pooling=decoder_pooling(spec, form.form, config, SentenceFiles(path), choice)
        )
    stems = ", ".join(name.removesuffix("ForCausalLM") for name in FAMILIES if name.endswith("ForCausalLM"))
    raise config.error(
        "architectures",
        "a decoder that raycore has a family for, as …Model, …ForCausalLM, …ForSequenceClassification, "
        f"…ForTokenClassification or …RewardModel, where … is one of {stems}; or an encoder, as …Model, …ForMaskedLM, "
        f"…ForSequenceClassification or …ForTokenClassification, where … is one of {', '.join(ENCODERS)}",
    )


def _with_architecture(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: {**values, "architectures": [name]}


def _described_by_transformers(
    path: Path, config: JsonFields, generation: JsonFields, max_length: int | None
) -> ModelSpec:
    if not is_installed("transformers"):
        needed = missing_package("others need", "transformers", "transformers")
        raise config.error("architectures", f"one of {known_families()}; {needed}")
    # it imports torch, which only workers do for raycore's own families
    describe = import_class("model_impl", "raycore.fallback.description.describe", MODELS)
    return describe(path, tokens_and_defaults(config, generation), max_length)
