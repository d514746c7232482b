"""The description of a model, brought in line with the tensors of its checkpoint. Does not import torch.

config.json and the files can disagree, for example after a tool has saved a model with other biases. What a tensor
says without doubt counts: a head or a bias that is there is used. Anything else is an error, because a model that
lacks a tensor, or leaves one out, computes something else than it was trained for.
"""

from __future__ import annotations

__all__ = ["fit_eagle3", "fit_model", "layer_prefix", "model_tensors", "wrong_shape"]

import logging
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from raycore.checkpoint.eagle3_spec import Eagle3Spec
from raycore.checkpoint.model_spec import ModelSpec
from raycore.checkpoint.moe_spec import EXPERT_NAMES, MoeSpec, has_stacked_experts
from raycore.checkpoint.quantization import stored_scheme
from raycore.checkpoint.rank_rows import DOWN_PROJ, O_PROJ, RankRows
from raycore.checkpoint.weight_files import StoredTensor, listed, stored_tensors
from raycore.errors import InvalidCheckpoint

logger = logging.getLogger(__name__)

Tensors = Mapping[str, StoredTensor]
Shapes = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes of tensors."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER_PREFIXES = ("midlayer.", "layers.0.")
"""Where checkpoints of EAGLE-3 heads have the layer's tensors."""
_NUMBERS = ("F32", "BF16", "F16")
_INTEGERS = ("I64", "I32")
_COMPARED_BYTES = 16 << 20
_BIASED = {
    "qkv_bias": ("q_proj", "k_proj", "v_proj"),
    "o_bias": ("o_proj",),
    "mlp_bias": ("gate_proj", "up_proj", "down_proj"),
}
"""The projections that have a bias or have none together, by the field of `ModelSpec`."""
_UNUSED = {
    r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)": "follow from config.json",
    r".*\.self_attn\.([kvq]_scale|prob_scale)": "scales of a quantized KV cache, which needs none here",
    r"mtp\..*": "layers that predict further tokens, which aren't supported",
    r"t2d": "the inverse of d2t",
}
"""Names of tensors that may be left out, as regular expressions, and why."""


def fit_model(spec: ModelSpec, path: Path) -> ModelSpec:
    """Return the description of the model in the directory `path`, with the head and the biases that its files have.

    Args:
        spec: what config.json says.

    Raises:
        InvalidCheckpoint: a file is missing or damaged, or the files lack a tensor, have one of another shape, or one
            that the model doesn't use. The message names the tensor, the file and both shapes.
    """
    tensors = stored_tensors(path)
    spec = _with_biases(spec, tensors, path, "model.layers.")
    own_head = _stored_head(spec, tensors)
    if spec.tie_word_embeddings and own_head is not None and not _same_bytes(own_head, tensors.get(EMBEDDING)):
        logger.warning(
            "%s has tie_word_embeddings=true, but %s has %s with other numbers than %s: the model uses this head",
            *(path / "config.json", own_head.file, HEAD, EMBEDDING),
        )
        spec = msgspec.structs.replace(spec, tie_word_embeddings=False)
    _check(dict(model_tensors(spec, tensors.__contains__)), spec, tensors, path)
    return spec


def fit_eagle3(spec: ModelSpec, head: Eagle3Spec, path: Path) -> ModelSpec:
    """Return the description of the layer of an EAGLE-3 head, with the biases that its files have.

    Raises:
        InvalidCheckpoint: as `fit_model`.
    """
    tensors = stored_tensors(path)
    prefix = layer_prefix(tensors.__contains__)
    spec = _with_biases(spec, tensors, path, prefix)
    _check(dict(_eagle3_tensors(spec, head, tensors, prefix)), spec, tensors, path)
    return spec


def layer_prefix(has_tensor: Callable[[str], bool] = lambda name: False) -> str:
    """Return how the names of the tensors of an EAGLE-3 head's layer begin."""
    return next((each for each in _LAYER_PREFIXES if has_tensor(f"{each}hidden_norm.weight")), _LAYER_PREFIXES[0])


def model_tensors(spec: ModelSpec, has_tensor: Callable[[str], bool]) -> Shapes:
    """Yield the tensors of a whole model. Quantized weights have the names and shapes that they would have else.

    `has_tensor`: whether the checkpoint has a tensor, which says how experts are stored.
    """
    yield EMBEDDING, (spec.vocab_size, spec.hidden_size)
    yield "model.norm.weight", (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        yield HEAD, (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        yield from _attention_tensors(spec, prefix, spec.hidden_size)
        if spec.moe is not None and spec.moe.sparse_layers[layer]:
            yield from _expert_tensors(spec, spec.moe, prefix, has_tensor)
        else:
            yield from _dense_tensors(spec, prefix)


def wrong_shape(described: str, found: tuple[int, ...], expected: tuple[int, ...]) -> InvalidCheckpoint:
    """Return the error for a tensor that has another shape than config.json says."""
    return InvalidCheckpoint(
        f"{described} has shape {found}, but config.json implies {expected}: the weights and config.json are of "
        "different models"
    )


def _attention_tensors(spec: ModelSpec, prefix: str, num_inputs: int) -> Shapes:
    rows = RankRows.of(spec, 0, 1)
    yield f"{prefix}input_layernorm.weight", (spec.hidden_size,)
    yield f"{prefix}post_attention_layernorm.weight", (spec.hidden_size,)
    for part in rows.qkv:
        yield f"{prefix}{part.name}.weight", (part.total, num_inputs)
        if spec.qkv_bias:
            yield f"{prefix}{part.name}.bias", (part.total,)
    yield f"{prefix}{O_PROJ}.weight", (spec.hidden_size, rows.q.total)
    if spec.o_bias:
        yield f"{prefix}{O_PROJ}.bias", (spec.hidden_size,)
    if spec.qk_norm:
        yield f"{prefix}self_attn.q_norm.weight", (spec.head_dim,)
        yield f"{prefix}self_attn.k_norm.weight", (spec.head_dim,)


def _dense_tensors(spec: ModelSpec, prefix: str) -> Shapes:
    for part in RankRows.of(spec, 0, 1).gate_up:
        yield f"{prefix}{part.name}.weight", (part.total, spec.hidden_size)
        if spec.mlp_bias:
            yield f"{prefix}{part.name}.bias", (part.total,)
    yield f"{prefix}{DOWN_PROJ}.weight", (spec.hidden_size, spec.intermediate_size)
    if spec.mlp_bias:
        yield f"{prefix}{DOWN_PROJ}.bias", (spec.hidden_size,)


def _expert_tensors(spec: ModelSpec, moe: MoeSpec, prefix: str, has_tensor: Callable[[str], bool]) -> Shapes:
    names, num, size, hidden = EXPERT_NAMES[spec.architecture], moe.num_experts, moe.intermediate_size, spec.hidden_size
    if has_stacked_experts(moe, has_tensor):
        yield f"{prefix}mlp.gate.weight", (num, hidden)
        yield f"{prefix}mlp.experts.gate_up_proj", (num, 2 * size, hidden)
        yield f"{prefix}mlp.experts.down_proj", (num, hidden, size)
        return
    yield f"{prefix}{names.block}.gate.weight", (num, hidden)
    for expert in range(num):
        of_expert = f"{prefix}{names.block}.experts.{expert}."
        yield f"{of_expert}{names.gate}.weight", (size, hidden)
        yield f"{of_expert}{names.up}.weight", (size, hidden)
        yield f"{of_expert}{names.down}.weight", (hidden, size)


def _eagle3_tensors(spec: ModelSpec, head: Eagle3Spec, tensors: Tensors, prefix: str) -> Shapes:
    hidden = spec.hidden_size
    if "embed_tokens.weight" in tensors:
        yield "embed_tokens.weight", (spec.vocab_size, hidden)
    yield "fc.weight", (hidden, head.target_hidden_size * len(head.target_layers))
    yield f"{prefix}hidden_norm.weight", (hidden,)
    yield from _attention_tensors(spec, prefix, 2 * hidden)
    yield from _dense_tensors(spec, prefix)
    yield "norm.weight", (hidden,)
    yield HEAD, (head.draft_vocab_size, hidden)
    if "d2t" in tensors:
        yield "d2t", (head.draft_vocab_size,)


def _with_biases(spec: ModelSpec, tensors: Tensors, path: Path, layers: str) -> ModelSpec:
    """Return the description with the biases that the files have in any layer. `layers`: prefix of layers' names."""
    found = {
        name.rsplit(".", 2)[1]: tensor
        for name, tensor in tensors.items()
        if name.endswith(".bias") and name.startswith(layers) and ".experts." not in name
    }
    stored = {kind: any(each in found for each in projections) for kind, projections in _BIASED.items()}
    changed = {kind: has_bias for kind, has_bias in stored.items() if has_bias != getattr(spec, kind)}
    for kind, has_bias in changed.items():
        logger.warning(
            "%s says that %s have %s bias, and the files have %s: the model is computed %s it",
            *(path / "config.json", "/".join(_BIASED[kind]), "no" if has_bias else "a"),
            *("one" if has_bias else "none", "with" if has_bias else "without"),
        )
    return msgspec.structs.replace(spec, **changed)


def _stored_head(spec: ModelSpec, tensors: Tensors) -> StoredTensor | None:
    scheme = stored_scheme(spec.quantization, tensors.__contains__, HEAD)
    name = HEAD if scheme is None else f"lm_head.{scheme.marker}"
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
    used: set[str] = set()
    missing: list[str] = []
    for name, shape in expected.items():
        # norms have the class of no target, which a scheme for all layers would fit
        scheme = stored_scheme(spec.quantization, tensors.__contains__, name) if len(shape) == 2 else None
        if scheme is not None:
            layer = name.removesuffix(".weight")
            used.update(f"{layer}.{each}" for each in scheme.tensors)
            name = f"{layer}.{scheme.marker}"  # workers check the shapes of its tensors
        used.add(name)
        if name not in tensors:
            missing.append(name)
        elif scheme is None:
            _check_tensor(name, tensors[name], shape)
    if missing:
        raise _lacking(missing, spec, tensors, path)
    _check_unused([name for name in tensors if name not in used], spec, tensors)


def _check_tensor(name: str, stored: StoredTensor, shape: tuple[int, ...]) -> None:
    described = f"tensor {name} of {stored.file}"
    if stored.shape != shape:
        raise wrong_shape(described, stored.shape, shape)
    dtypes = _INTEGERS if name == "d2t" else _NUMBERS
    if stored.dtype not in dtypes:
        raise InvalidCheckpoint(f"{described} is stored as {stored.dtype}: expected {' or '.join(dtypes)}")


def _lacking(missing: list[str], spec: ModelSpec, tensors: Tensors, path: Path) -> InvalidCheckpoint:
    files = sorted({tensor.file.name for tensor in tensors.values()})
    why = "the weights and config.json are of different models"
    if missing == [HEAD]:
        why = "a model whose head is its embedding needs tie_word_embeddings=true in config.json"
    elif 0 < (num_layers := _num_layers(tensors)) < spec.num_layers:
        why = f"they have {num_layers} layers, and config.json has num_hidden_layers={spec.num_layers}"
    return InvalidCheckpoint(
        f"{path} lacks {_count(missing, 'tensor')} of its {spec.architecture}: {listed(missing)}. Its "
        f"{listed(files)} hold {len(tensors)} tensors: {why}"
    )


def _check_unused(unused: list[str], spec: ModelSpec, tensors: Tensors) -> None:
    for pattern, reason in _UNUSED.items():
        known = [name for name in unused if re.fullmatch(pattern, name)]
        if known:
            logger.info("%s not used (%s): %s", _count(known, "tensor"), reason, listed(known))
        unused = [name for name in unused if name not in set(known)]
    unused = [name for name in unused if not (name == HEAD and spec.tie_word_embeddings)]
    if not unused:
        return
    why = f"a {spec.architecture} as config.json describes it has no such part"
    if (num_layers := _num_layers(tensors)) > spec.num_layers:
        why = f"the files have {num_layers} layers, and config.json has num_hidden_layers={spec.num_layers}"
    raise InvalidCheckpoint(
        f"{tensors[unused[0]].file} has {_count(unused, 'tensor')} that the model wouldn't use: {listed(unused)} "
        f"(the first of shape {tensors[unused[0]].shape}): {why}"
    )


def _num_layers(tensors: Tensors) -> int:
    return 1 + max(
        (int(found[1]) for name in tensors if (found := re.match(r"model\.layers\.(\d+)\.", name))), default=-1
    )


def _count(names: list[str], noun: str) -> str:
    return f"{len(names)} {noun}{'s' * (len(names) != 1)}"
