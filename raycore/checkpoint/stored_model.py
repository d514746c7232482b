"""The description of a model, brought in line with the tensors of its checkpoint. Does not import torch.

config.json and the files can disagree, for example after a tool has saved a model with other biases. What a tensor
says without doubt counts: a head or a bias that is there is used. Anything else is an error, because a model that
lacks a tensor, or leaves one out, computes something else than it was trained for.

The first process that sees the files, usually the driver, compares them with config.json, and notes in the description
which tensors they hold. Processes that get this description compare only that: their node may have other files.
"""

from __future__ import annotations

__all__ = ["fit_eagle3", "fit_model", "fit_mtp", "wrong_shape"]

import hashlib
import logging
import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from raycore.checkpoint.encoder_tensors import encoder_tensors, with_norm_names
from raycore.checkpoint.gguf.header import BLOCKS, is_gguf
from raycore.checkpoint.stored_tensor import StoredTensor
from raycore.checkpoint.tensor_shapes import eagle3_tensors, layer_prefix, model_tensors, mtp_tensors
from raycore.checkpoint.weight_files import listed, stored_tensors
from raycore.errors import InvalidCheckpoint
from raycore.models.quantization import GGUF_SCHEMES, stored_scheme
from raycore.models.spec import ModelSpec
from raycore.parts.drafts.checkpoint.eagle3 import Eagle3Spec
from raycore.parts.drafts.checkpoint.mtp import MtpSpec
from raycore.parts.experts.models import MXFP4_NUMBERS, MXFP4_SCALES, as_stacked

logger = logging.getLogger(__name__)

Tensors = Mapping[str, StoredTensor]
_NUMBERS = ("F32", "BF16", "F16")
_GGUF_NUMBERS = tuple(BLOCKS)
_INTEGERS = ("I64", "I32")
_BYTES = ("U8",)
_COMPARED_BYTES = 16 << 20
_BIASES = ("qkv_bias", "o_bias", "mlp_bias")
"""Fields of `ModelSpec`. The projections of each have a bias or have none together."""
_PREDICTORS = "layers that predict further tokens, with which only method='mtp' drafts"
_IMAGES = "for images, which the engine doesn't get"
_TEXTS = "for texts, which the engine doesn't compute"
_NO_WEIGHTS = {
    r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)": "follow from config.json",
    r".*\.self_attn\.([kvq]_proj\.)?([kvq]_scale|prob_scale|output_scale)": (
        "scales of a quantized KV cache, which needs none here"
    ),
    r".*\.self_attn\.(slope_rate|(query|key|diagonal)_decay)": "follow from config.json",
    r".*\.(attn|attention)\.(masked_)?bias": "masks, which follow from positions",
}
_UNUSED = {
    **_NO_WEIGHTS,
    r"(.*\.)?mtp(_\w+)?\..*": _PREDICTORS,
    r"t2d": "the inverse of d2t",
}
"""Names of tensors that may be left out, as regular expressions, and why."""


def fit_model(spec: ModelSpec, path: Path) -> ModelSpec:
    """Return the description of the model in the directory `path`, with the head and the biases that its files have.

    Args:
        spec: what config.json says, or what this function has returned, perhaps on another node.

    Raises:
        InvalidCheckpoint: a file is missing or damaged, or the files lack a tensor, have one of another shape, or one
            that the model doesn't use. The message names the tensor, the file and both shapes. Or `spec` was compared
            with files of another model.
    """
    return _fitted(spec, path, _as_stored)


def fit_eagle3(spec: ModelSpec, head: Eagle3Spec, path: Path) -> ModelSpec:
    """Return the description of the layer of an EAGLE-3 head, with the biases that its files have.

    Raises:
        InvalidCheckpoint: as `fit_model`.
    """
    return _fitted(spec, path, partial(_head_as_stored, head))


def fit_mtp(spec: ModelSpec, head: MtpSpec, path: Path) -> ModelSpec:
    """Return the description of the layer of a head in its target's checkpoint, with the biases that its files have.

    Raises:
        InvalidCheckpoint: as `fit_model`. Tensors that aren't the head's don't matter.
    """
    return _fitted(spec, path, partial(_own_head_as_stored, head))


def wrong_shape(described: str, found: tuple[int, ...], expected: tuple[int, ...]) -> InvalidCheckpoint:
    """Return the error for a tensor that has another shape than config.json says."""
    return InvalidCheckpoint(
        f"{described} has shape {found}, but config.json implies {expected}: the weights and config.json are of "
        "different models"
    )


def _fitted(spec: ModelSpec, path: Path, fit: Callable[[ModelSpec, Tensors, Path], ModelSpec]) -> ModelSpec:
    tensors = stored_tensors(path)
    fingerprint = _fingerprint(tensors)
    if fingerprint == spec.fitted_to:
        return spec
    fitted = fit(spec, tensors, path)
    if spec.fitted_to is not None and fitted != spec:
        changed = [name for name in spec.__struct_fields__ if getattr(fitted, name) != getattr(spec, name)]
        raise InvalidCheckpoint(
            f"{path} on this node is of another model than where the engine was started: {', '.join(changed)} "
            f"{'differs' if len(changed) == 1 else 'differ'}. Copy the same checkpoint to all nodes"
        )
    return msgspec.structs.replace(fitted, fitted_to=fingerprint)


def _fingerprint(tensors: Tensors) -> str:
    """Return a name for tensors with these names, dtypes and shapes, in whichever files."""
    described = sorted((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    return hashlib.blake2b(msgspec.msgpack.encode(described), digest_size=16).hexdigest()


def _as_stored(spec: ModelSpec, tensors: Tensors, path: Path) -> ModelSpec:
    spec = _with_norms(_with_prefixes(_with_roots(spec, tensors), tensors), tensors)
    spec = as_stacked(spec, lambda name: tensors[name].shape if name in tensors else None)
    names = spec.names
    if spec.encoder is not None:
        return _encoder_as_stored(spec, tensors, path)
    spec = _with_biases(spec, tensors, path, [names.layer(layer) for layer in range(spec.num_layers)])
    if spec.pooling is not None:
        spec = msgspec.structs.replace(spec, pooling=spec.pooling.with_biases(tensors.__contains__))
    own_head = _stored_head(spec, tensors) if spec.pooling is None else None
    if spec.tie_word_embeddings and own_head is not None and not _same_bytes(own_head, tensors.get(names.embedding)):
        logger.warning(
            "%s has tie_word_embeddings=true, but %s has %s with other numbers than %s: the model uses this head",
            *(path / "config.json", own_head.file, names.head, names.embedding),
        )
        spec = msgspec.structs.replace(spec, tie_word_embeddings=False)
    _check(dict(model_tensors(spec, tensors.__contains__)), spec, tensors, path)
    return spec


def _encoder_as_stored(spec: ModelSpec, tensors: Tensors, path: Path) -> ModelSpec:
    spec = with_norm_names(spec, tensors.__contains__)
    pooling = spec.pooling
    if pooling is not None:
        pooling = pooling.with_biases(tensors.__contains__)
        spec = msgspec.structs.replace(spec, pooling=pooling)
    heads = {} if pooling is None else pooling.own_tensors()
    _check(dict(encoder_tensors(spec)) | heads, spec, tensors, path)
    return spec


def _head_as_stored(head: Eagle3Spec, spec: ModelSpec, tensors: Tensors, path: Path) -> ModelSpec:
    prefix = layer_prefix(tensors.__contains__)
    spec = _with_biases(spec, tensors, path, [prefix])
    _check(dict(eagle3_tensors(spec, head, tensors.__contains__, prefix)), spec, tensors, path)
    return spec


def _own_head_as_stored(head: MtpSpec, spec: ModelSpec, tensors: Tensors, path: Path) -> ModelSpec:
    spec = _with_roots(spec, tensors)
    beginnings, copies = head.own_tensors(spec), head.copies(spec)
    own = {name: each for name, each in tensors.items() if name.startswith(beginnings) and not name.startswith(copies)}
    if not own:
        raise InvalidCheckpoint(
            f"{path} has no tensor {beginnings[0]}*, the layer that predicts further tokens, with which method='mtp' "
            "drafts: use files that have it, or another method"
        )
    spec = _with_biases(spec, own, path, [head.tensors(spec, index=index).layer for index in range(spec.num_layers)])
    expected = dict(mtp_tensors(spec, head, tensors.__contains__))
    # a norm may be the model's
    own |= {name: tensors[name] for name in expected if name in tensors}
    unknown = _unused(expected, spec, own, path)
    unknown = [name for name in unknown if not any(re.fullmatch(known, name) for known in _NO_WEIGHTS)]
    if unknown:
        raise InvalidCheckpoint(
            f"{path} has {_count(unknown, 'tensor')} that the layer that predicts further tokens wouldn't use: "
            f"{listed(unknown)}: raycore computes another kind of layer, so use another method than 'mtp'"
        )
    return spec


def _with_roots(spec: ModelSpec, tensors: Tensors) -> ModelSpec:
    """Return the description with the names that the files have, if the family knows several."""
    known = [spec.names.roots, *spec.names.other_roots]
    for roots in known:
        others = [each for each in known if each != roots]
        names = msgspec.structs.replace(spec.names, roots=roots, other_roots=others)
        if names.embedding in tensors:
            return msgspec.structs.replace(spec, names=names)
    return spec


def _with_prefixes(spec: ModelSpec, tensors: Tensors) -> ModelSpec:
    """Return the description with the names that the files have for the tensors of the encoder of images."""
    vision = spec.vision
    if vision is None:
        return spec
    for field, others in (("prefix", "other_prefixes"), ("projector", "other_projectors")):
        known: list[str] = [getattr(vision, field), *getattr(vision, others)]
        # the longest one, because one may begin with another
        fitting = [each for each in known if any(name.startswith(each) for name in tensors)]
        chosen = max(fitting, key=len, default=known[0])
        rest = [each for each in known if each != chosen]
        vision = msgspec.structs.replace(vision, **{field: chosen, others: rest})
    return msgspec.structs.replace(spec, vision=vision)


def _with_norms(spec: ModelSpec, tensors: Tensors) -> ModelSpec:
    """Return the description with the name that the files have for norms after attention, if the family knows two."""
    names, other = spec.names, spec.names.other_after_attention
    layers = [layer for layer in range(spec.num_layers) if spec.norms(layer).after_attention is not None]
    if other is None or not any(f"{names.layer(layer)}{other}.weight" in tensors for layer in layers):
        return spec
    names = msgspec.structs.replace(names, after_attention=other, other_after_attention=names.after_attention)
    return msgspec.structs.replace(spec, names=names)


def _with_biases(spec: ModelSpec, tensors: Tensors, path: Path, prefixes: Sequence[str]) -> ModelSpec:
    """Return the description with the biases that the files have in any layer.

    `prefixes`: by layer, of the names of its tensors.
    """
    fitted = spec
    for kind in _BIASES:
        biases = _biases(spec, kind, prefixes)
        has_bias = any(each in tensors for each in biases)
        if not biases or has_bias == getattr(spec, kind):
            continue
        projections = dict.fromkeys(each.rsplit(".", 2)[1] for each in biases)
        logger.warning(
            "%s says that %s have %s bias, and the files have %s: the model is computed %s it",
            *(path / "config.json", "/".join(projections), "no" if has_bias else "a"),
            *("one" if has_bias else "none", "with" if has_bias else "without"),
        )
        fitted = msgspec.structs.replace(fitted, **{kind: has_bias})
    return fitted


def _biases(spec: ModelSpec, kind: str, prefixes: Sequence[str]) -> list[str]:
    """Return the tensors that the model has if the field `kind` says so, and otherwise doesn't have."""
    without, biased = (
        _tensors_of_linears(msgspec.structs.replace(spec, **{kind: each}), prefixes) for each in (False, True)
    )
    return [name for name in biased if name not in without]


def _tensors_of_linears(spec: ModelSpec, prefixes: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of all layers' linear layers, by name."""
    return {
        f"{prefix}{name}": shape
        for layer, prefix in enumerate(prefixes)
        for part in (spec.mixers[layer], spec.feed_forwards[layer])
        for linear in part.linears(spec)
        for name, shape in linear.tensors()
    }


def _stored_head(spec: ModelSpec, tensors: Tensors) -> StoredTensor | None:
    scheme = stored_scheme(spec.quantization, tensors.__contains__, spec.names.head)
    name = spec.names.head if scheme is None else scheme.tensor(spec.names.head, scheme.marker)
    return tensors.get(name)


def _same_bytes(one: StoredTensor, other: StoredTensor | None) -> bool:
    """Whether two tensors are the same, so that memory needs only one of them."""
    if other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as one_file, other.file.open("rb") as other_file:
        first = mmap.mmap(one_file.fileno(), 0, access=mmap.ACCESS_READ)
        second = mmap.mmap(other_file.fileno(), 0, access=mmap.ACCESS_READ)
        with first, second:
            return all(
                first[one.start + at : min(one.start + at + _COMPARED_BYTES, one.end)]
                == second[other.start + at : min(other.start + at + _COMPARED_BYTES, other.end)]
                for at in range(0, one.end - one.start, _COMPARED_BYTES)
            )


def _check(expected: dict[str, tuple[int, ...]], spec: ModelSpec, tensors: Tensors, path: Path) -> None:
    """Raise InvalidCheckpoint if the files don't hold exactly these tensors."""
    _check_unused(_unused(expected, spec, tensors, path), spec, tensors)


def _unused(expected: dict[str, tuple[int, ...]], spec: ModelSpec, tensors: Tensors, path: Path) -> list[str]:
    """Return the tensors that aren't expected. Raises InvalidCheckpoint if the files lack one, or have it otherwise."""
    used: set[str] = set()
    missing: list[str] = []
    for name, shape in expected.items():
        # norms have the class of no target, which a scheme for all layers would fit
        scheme = stored_scheme(spec.quantization, tensors.__contains__, name) if len(shape) > 1 else None
        if scheme is not None:
            used.update(scheme.tensor(name, each) for each in scheme.tensors)
            name = scheme.tensor(name, scheme.marker)  # workers check the shapes of its tensors
        used.add(name)
        if name not in tensors:
            missing.append(name)
        elif scheme is None or scheme.layout == "gguf":
            _check_tensor(name, tensors[name], shape)
            if scheme is not None and GGUF_SCHEMES.get(tensors[name].dtype) != scheme:
                raise InvalidCheckpoint(
                    f"tensor {name} of {tensors[name].file} is stored as {tensors[name].dtype}, and the engine keeps "
                    f"this weight in integers of {scheme.bits} bits of another type: use a file with the types of the "
                    "engine's first one"
                )
    unused = [name for name in tensors if name not in used]
    if missing:
        raise _lacking(missing, unused, spec, tensors, path)
    return unused


def _check_tensor(name: str, stored: StoredTensor, shape: tuple[int, ...]) -> None:
    described = f"tensor {name} of {stored.file}"
    if stored.shape != shape:
        raise wrong_shape(described, stored.shape, shape)
    is_mxfp4 = name.endswith((MXFP4_NUMBERS, MXFP4_SCALES))
    dtypes = _INTEGERS if name == "d2t" else _BYTES if is_mxfp4 else _NUMBERS
    if is_gguf(stored.file):
        dtypes = _GGUF_NUMBERS
    if stored.dtype not in dtypes:
        raise InvalidCheckpoint(f"{described} is stored as {stored.dtype}: expected {' or '.join(dtypes)}")


def _lacking(missing: list[str], unused: list[str], spec: ModelSpec, tensors: Tensors, path: Path) -> InvalidCheckpoint:
    files = sorted({tensor.file.name for tensor in tensors.values()})
    source = _source(path)
    why = f"the weights and {source} are of different models"
    strange = [name for name in unused if not any(re.fullmatch(known, name) for known in _without_use(spec))]
    if strange:
        why += f" (the model wouldn't use {listed(strange)})"
    if missing == [spec.names.head]:
        why = "a model whose head is its embedding needs tie_word_embeddings=true in config.json"
    elif 0 < (num_layers := _num_layers(spec, tensors)) < spec.num_layers:
        why = f"they have {num_layers} layers, and {source} has num_hidden_layers={spec.num_layers}"
    return InvalidCheckpoint(
        f"{path} lacks {_count(missing, 'tensor')} of its {spec.architecture}: {listed(missing)}. Its "
        f"{listed(files)} hold {len(tensors)} tensors: {why}"
    )


def _without_use(spec: ModelSpec) -> dict[str, str]:
    """Patterns of the tensors that checkpoints may have and nobody reads, and why."""
    # where they have another place, a layer after the last one is too many
    num_predictors = spec.num_predictors if spec.mtp is None or spec.mtp.layer is None else 0
    predictors = range(spec.num_layers, spec.num_layers + num_predictors)
    patterns = _UNUSED | {f"{re.escape(spec.names.layer(layer))}.*": _PREDICTORS for layer in predictors}
    for layer, mixer in enumerate(spec.mixers):
        prefix = re.escape(spec.names.layer(layer))
        patterns |= {f"{prefix}{pattern}": why for pattern, why in mixer.unused.items()}
    if spec.encoder is not None:
        patterns |= spec.encoder.unused
    if spec.names.images is not None:
        patterns[spec.names.images] = _IMAGES
    if spec.encodes_only:
        patterns[".*"] = _TEXTS
    if spec.pooling is not None:
        patterns[rf"{re.escape(spec.names.roots.head)}\..*"] = "the head for texts, which models that pool don't need"
    return patterns


def _check_unused(unused: list[str], spec: ModelSpec, tensors: Tensors) -> None:
    for pattern, reason in _without_use(spec).items():
        known = [name for name in unused if re.fullmatch(pattern, name)]
        if known:
            logger.info("%s not used (%s): %s", _count(known, "tensor"), reason, listed(known))
        unused = [name for name in unused if name not in set(known)]
    unused = [name for name in unused if not (name == spec.names.head and spec.tie_word_embeddings)]
    zeros = {name for name in unused if name.endswith(".bias") and _is_zero(tensors[name])}
    if zeros:  # some tools for quantization write them for each layer
        logger.info("%s not used (all zero): %s", _count(sorted(zeros), "tensor"), listed(sorted(zeros)))
    unused = [name for name in unused if name not in zeros]
    if not unused:
        return
    source = _source(tensors[unused[0]].file)
    why = f"a {spec.architecture} as {source} describes it has no such part"
    if (num_layers := _num_layers(spec, tensors)) > spec.num_layers:
        why = f"the files have {num_layers} layers, and {source} has num_hidden_layers={spec.num_layers}"
    raise InvalidCheckpoint(
        f"{tensors[unused[0]].file} has {_count(unused, 'tensor')} that the model wouldn't use: {listed(unused)} "
        f"(the first of shape {tensors[unused[0]].shape}): {why}"
    )


def _source(path: Path) -> str:
    """Return what describes the model of a file, or of a directory."""
    return "metadata" if is_gguf(path) else "config.json"


def _is_zero(tensor: StoredTensor) -> bool:
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        return not any(file.read(tensor.end - tensor.start))


def _num_layers(spec: ModelSpec, tensors: Tensors) -> int:
    layer = re.compile(rf"{re.escape(spec.names.layers)}(\d+)\.")
    return 1 + max((int(found[1]) for name in tensors if (found := layer.match(name))), default=-1)


def _count(names: list[str], noun: str) -> str:
    return f"{len(names)} {noun}{'s' * (len(names) != 1)}"
