"""What a checkpoint's config.json says of quantized weights: which layers are quantized, and how each is stored.

The formats are those of compressed-tensors, ModelOpt, GPTQ, AWQ, TorchAO, MXFP4 and of fp8 as DeepSeek, Mistral and
Llama store it. Their configurations differ, but each of them says for a layer's name which `WeightScheme` it has. This
module doesn't import torch or read weights; `quantized`, `fp8_blocks` and `mxfp4` in `raycore.weights` read them.
"""

from __future__ import annotations

__all__ = [
    "GGUF_SCHEMES",
    "MXFP4_GROUP",
    "Quantization",
    "WeightScheme",
    "of_any_expert",
    "parse_quantization",
    "quantization_of",
    "stored_scheme",
]

import re
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from raycore.json_fields import JsonFields

_KEYS = ("quantization_config", "compression_config")
"""The second is the name in files of older versions of compressed-tensors."""
_CLASSES = ("Linear", "Embedding")
"""The classes of layers that a target of compressed-tensors may name."""
_FP4_GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
"""By the format: inputs that share a scale."""
_FORMATS = ("float-quantized", "int-quantized", "pack-quantized", *_FP4_GROUPS, "mxfp8-quantized")
_MIXED = "mixed-precision"
"""The format of a file whose groups each have a format of their own."""
_ORDERED = ("group", "dynamic", True)
"""Values of `actorder` with which weight_g_idx has the group of each input. `dynamic` and True are old names."""
_IN_ORDER = (None, False, "weight", "static")
"""Values of `actorder` with which neighboring inputs form a group."""
_WEIGHT = ".weight"
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
MXFP4_GROUP = 32
"""Inputs that share a scale in MXFP4."""
_MXFP8_GROUP = 32
_ROTATED = "weights that are rotated or otherwise transformed"

_TRANSPOSED_TENSORS = ("qweight", "qzeros", "scales", "g_idx")
_COMPRESSED_TENSORS = (
    *("weight", "weight_packed", "weight_scale", "weight_shape", "weight_g_idx"),
    "weight_zero_point",  # old versions wrote it for symmetric weights, too, where it says nothing
    "input_scale",  # of inputs that all have one scale: here, each row has its own, which is more precise
    *("weight_global_scale", "weight_scale_2", "input_global_scale"),  # of numbers of 4 bits
)
_FP8_TENSORS = (
    *("weight", "weight_scale", "weight_scale_inv", "input_scale", "activation_scale", "input_scale_ub"),
    "weight_zero_point",  # as above
)
_FP8_SCALES = ("weight_scale", "weight_scale_inv")
"""What tools call the scales of weights in fp8. Both are what the stored numbers are multiplied by."""
_TORCHAO_NUMBERS, _TORCHAO_SCALES = "_weight_qdata", "_weight_scale"
_TORCHAO_TENSORS = (
    *(_TORCHAO_NUMBERS, _TORCHAO_SCALES, "_weight_zero_point"),
    *("_weight_act_quant_scale", "_weight_act_quant_zero_point"),  # of inputs, as input_scale
)
_TORCHAO: dict[str, tuple[Literal["float8", "torchao"], int, Literal[8, 16]]] = {
    "Int8WeightOnlyConfig": ("torchao", 8, 16),
    "Int8DynamicActivationInt8WeightConfig": ("torchao", 8, 8),
    "Int8StaticActivationInt8WeightConfig": ("torchao", 8, 8),
    "IntxWeightOnlyConfig": ("torchao", 8, 16),
    "Int8DynamicActivationIntxWeightConfig": ("torchao", 8, 16),
    "Int4WeightOnlyConfig": ("torchao", 4, 16),
    "Float8DynamicActivationInt4WeightConfig": ("torchao", 4, 16),
    "Float8WeightOnlyConfig": ("float8", 8, 16),
    "Float8DynamicActivationFloat8WeightConfig": ("float8", 8, 16),
}
"""By the tool's configuration: layout, bits and row bits."""

RowBits = Literal[8, 16]
"""Number of bits to which the numbers of a linear layer's input are rounded."""

Layout = Literal["float8", "int8", "packed", "fp4", "gptq", "awq", "mxfp4", "gguf", "torchao"]
"""How a weight is stored. The first three are compressed-tensors'.

float8: float8_e4m3fn, and int8: int8, both with scales. Other tools store float8, too.
packed: int32 words along the inputs, the first input in the lowest bits.
fp4: bytes along the inputs, each with two numbers of 4 bits, and scales of groups in 8 bits: in fp8, which a scale of
the whole weight multiplies or divides (NVFP4), or powers of two (MXFP4).
gptq: the same words, but transposed.
awq: int32 words along the outputs, in an order of their own, also transposed.
mxfp4: bytes along the inputs, each with two numbers of 4 bits. Only stacked experts are stored like this.
gguf: blocks along the inputs, each with its scales, of the type that the file says.
torchao: signed integers of 8 bits, or of 4 bits in bytes along the inputs.
"""

Format = Literal["fp8", "fp8_blocks", "integers"]
"""What a device needs kernels for to keep weights as they are stored: fp8 with scales of rows, or of blocks of rows and
inputs, or integers."""

Code = Literal["integer", "affine", "e2m1", "e4m3"]
"""What the bits of a weight stand for, each with a scale for its group.

integer: an unsigned integer, from which a zero is subtracted before it is scaled. The zero is an integer, too.
affine: an unsigned integer, to which an offset is added after it was scaled.
e2m1: a number of 4 bits in E2M1, the format of MXFP4: a sign, two bits of the exponent, and one of the fraction. Twice
such a number is an integer from -12 to 12.
e4m3: a number of 8 bits in E4M3, as in fp8. It has no zero.
"""


class WeightScheme(msgspec.Struct, frozen=True):
    """How the weight of one linear layer is stored."""

    layout: Layout
    bits: int
    group_size: int | None = None
    """Number of inputs that share a scale, for each output. None: all of them do."""
    symmetric: bool = True
    """Whether the middle one of the integers stands for zero. Otherwise, zero points are stored. GPTQ and AWQ store
    them in any case."""
    is_ordered: bool = False
    """Whether the checkpoint must have the group of each input. Otherwise, neighboring inputs form a group."""
    zero_offset: int = 0
    """What must be added to stored zero points."""
    block: tuple[int, int] | None = None
    """float8: numbers of neighboring outputs and inputs that share a scale. None: an output has one scale, or all
    have."""
    scales: str = "weight_scale"
    """float8: what the tensor of scales is called."""
    numbers: str = "weight"
    """float8 and torchao: what the tensor of numbers is called."""
    row_bits: RowBits = 16
    """8: the weights were made for inputs that are rounded to 8 bits, each row with a scale of its own."""
    code: Code = "integer"

    @property
    def marker(self) -> str:
        """The tensor that a layer has if it is stored like this. Its name follows that of the layer."""
        names = {"packed": "weight_packed", "gptq": "qweight", "awq": "qweight", "gguf": "weight"}
        names["torchao"] = self.numbers
        return names.get(self.layout, self.scales)

    @property
    def kept_code(self) -> Code:
        """What the bits stand for where the weight is kept with scales of groups of inputs."""
        return "e4m3" if self.layout == "float8" else self.code

    @property
    def tensors(self) -> tuple[str, ...]:
        """All tensors that a layer may have if it is stored like this. Not every layer has all of them."""
        if self.numbers == _TORCHAO_NUMBERS:
            return _TORCHAO_TENSORS
        if self.layout == "float8":
            return _FP8_TENSORS
        return _TRANSPOSED_TENSORS if self.layout in ("gptq", "awq") else _COMPRESSED_TENSORS

    @property
    def format(self) -> Format:
        """What keeps the weight as it is stored."""
        if self.layout != "float8":
            return "integers"
        return "fp8" if self.block is None else "fp8_blocks"

    @property
    def named(self) -> list[WeightScheme]:
        """The scheme with each name that tools have for the scales."""
        if self.layout != "float8" or self.scales not in _FP8_SCALES:
            return [self]
        return [msgspec.structs.replace(self, scales=name) for name in _FP8_SCALES]

    def tensor(self, weight: str, tensor: str) -> str:
        """Return the name of one of `tensors` of a weight: of `a.weight`, or of experts in one tensor `a`, for which
        `a_scale` takes the place of `a.weight_scale`."""
        if weight.endswith(_WEIGHT):
            return f"{weight.removesuffix(_WEIGHT)}.{tensor}"
        return weight + (tensor.removeprefix("weight") if tensor.startswith("weight") else f"_{tensor}")


_MXFP8 = WeightScheme("float8", 8, block=(1, _MXFP8_GROUP))
GGUF_SCHEMES = {
    "Q8_0": WeightScheme("gguf", 8, 32),
    "Q4_0": WeightScheme("gguf", 4, 32),
    "Q4_1": WeightScheme("gguf", 4, 32, code="affine"),
    "Q4_K": WeightScheme("gguf", 4, 32, code="affine"),
    "Q5_0": WeightScheme("gguf", 8, 32),
    "Q5_1": WeightScheme("gguf", 8, 32, code="affine"),
    "Q5_K": WeightScheme("gguf", 8, 32, code="affine"),
    "Q6_K": WeightScheme("gguf", 8, 16),
}
"""By the name of a quantized type in GGUF files: how its numbers are kept, exactly. The integers of 5 and 6 bits are
kept in 8."""


class Quantization(msgspec.Struct, frozen=True):
    """Which layers of a checkpoint are quantized, and how."""

    method: str
    """quant_method of config.json."""
    targets: list[tuple[str, WeightScheme | None]]
    """Names of layers, `re:` and a regular expression that the beginning of a name matches, or a class of layers. The
    first target that fits a layer has its scheme. None: the layer isn't quantized."""
    ignore: list[str] = []
    """Targets that aren't quantized, although others fit them."""
    experts: WeightScheme | None = None
    """How stacked experts are stored. None: they aren't quantized."""
    named: dict[str, WeightScheme] = {}
    """Layers by their names, as `of_any_expert` has them. They count before all targets."""

    def scheme_of(self, layer: str) -> WeightScheme | None:
        """Return how the layer with this name is stored, for example `lm_head`. None: it isn't quantized.

        For GPTQ and AWQ, config.json doesn't say that all layers with a scheme are quantized. Their tensors do.
        """
        if any(_fits(target, layer) for target in self.ignore):
            return None
        name = of_any_expert(layer) if self.named else layer
        return (
            self.named[name]
            if name in self.named
            else next((scheme for target, scheme in self.targets if _fits(target, layer)), None)
        )

    @property
    def formats(self) -> set[Format]:
        """What would keep all weights as they are stored."""
        return {scheme.format for scheme in self._schemes}

    def bits(self, name: Format) -> int:
        """Return the fewest bits that a weight of this format has, without its scales."""
        return min(scheme.bits for scheme in self._schemes if scheme.format == name)

    @property
    def is_fp8(self) -> bool:
        """Whether all quantized weights are in fp8."""
        return self.formats in ({"fp8"}, {"fp8_blocks"}, {"fp8", "fp8_blocks"})

    @property
    def is_ordered(self) -> bool:
        """Whether all weights in integers have groups of similar inputs. None of them is kept."""
        integers = [scheme for scheme in self._schemes if scheme.format == "integers"]
        return bool(integers) and all(scheme.is_ordered for scheme in integers)

    @property
    def codes(self) -> set[Code]:
        """What the bits of weights in integers stand for."""
        return {scheme.code for scheme in self._schemes if scheme.format == "integers"}

    @property
    def row_bits(self) -> set[RowBits]:
        """The bits that `WeightScheme.row_bits` says of weights in integers."""
        return {scheme.row_bits for scheme in self._schemes if scheme.format == "integers"}

    @property
    def _schemes(self) -> list[WeightScheme]:
        found = (self.experts, *self.named.values(), *(scheme for _, scheme in self.targets))
        return [each for each in found if each is not None]


def of_any_expert(layer: str) -> str:
    """Return a layer's name with `*` in place of the number of an expert."""
    return _EXPERT.sub("*", layer)


def stored_scheme(
    quantization: Quantization | None, has_tensor: Callable[[str], bool], name: str
) -> WeightScheme | None:
    """Return how the weight `name`, for example `lm_head.weight`, is stored. None: it isn't quantized.

    A weight that config.json has as quantized isn't if the checkpoint has an ordinary tensor instead. Experts in one
    tensor are only looked for in fp8.
    """
    is_layer = name.endswith(_WEIGHT)
    if quantization is None or not (is_layer or has_tensor(f"{name}_scale_inv")):
        return None
    scheme = quantization.scheme_of(name.removesuffix(_WEIGHT))
    if scheme is None or not (is_layer or scheme.layout == "float8"):
        return None
    found = [each for each in scheme.named if has_tensor(each.tensor(name, each.marker))]
    return found[0] if found else None if has_tensor(name) else scheme


def parse_quantization(config: JsonFields) -> Quantization | None:
    """Return what config.json says of quantized weights, or None if there are none.

    Raises:
        InvalidCheckpoint: weights are quantized in a way that raycore doesn't read. The message names what the file
            says.
    """
    key = next((key for key in _KEYS if config.get(key) is not None), None)
    return None if key is None else quantization_of(config.child(key))


def quantization_of(fields: JsonFields) -> Quantization | None:
    """Return what such an object says, in config.json or in another file, as `parse_quantization` does."""
    parsers: dict[str, Callable[[JsonFields], Quantization | None]] = {
        "compressed-tensors": _compressed_tensors,
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm_fp8,
        "modelopt": _modelopt,
        "mxfp4": _mxfp4,
        "torchao": _torchao,
        "gguf": _gguf,
    }
    _require(fields, "quant_method", *parsers)
    return parsers[fields.get("quant_method")](fields)


def _compressed_tensors(fields: JsonFields) -> Quantization | None:
    """Scales for a cache in 8 bits aren't used: if only it is quantized, there are no groups."""
    if fields.get("kv_cache_scheme") and not fields.child("config_groups").values:
        return None
    _require(fields, "format", *_FORMATS, _MIXED)
    _refuse(fields, "transform_config", _ROTATED)
    _refuse(fields, "moe_sparsity_config", "sparse experts")
    if fields.child("sparsity_config").get("format") != "dense":
        _refuse(fields, "sparsity_config", "sparse weights")
    groups = fields.child("config_groups")
    if not groups.values:
        raise fields.error("config_groups", "an object with a scheme of quantization")
    schemes: dict[str, WeightScheme | None] = {}
    for name in groups.values:
        group = groups.child(name)
        if not group.list_("targets"):
            raise group.error("targets", "a list of layers")
        scheme = _group_scheme(group, fields if group.get("format") is None else group)
        schemes |= dict.fromkeys(_targets(group, "targets"), scheme)
    # as the tool has it: layers' names come before expressions, and those before classes
    order = sorted(schemes, key=lambda target: (target in _CLASSES, target.startswith("re:"), target))
    return Quantization(
        "compressed-tensors", [(target, schemes[target]) for target in order], _targets(fields, "ignore")
    )


def _group_scheme(group: JsonFields, formatted: JsonFields) -> WeightScheme:
    """Return the scheme of a config group. `formatted`: what has the group's format."""
    _require(formatted, "format", *_FORMATS)
    if group.get("output_activations") is not None:
        raise group.error("output_activations", "no value: only the inputs of linear layers may be quantized")
    weights, layout = group.child("weights"), formatted.get("format")
    _require(weights, "dynamic", None, False)
    if layout == "float-quantized":
        has_inputs = group.get("input_activations") is not None
        return _float_scheme(weights, [group.child("input_activations")] if has_inputs else [])
    if layout in _FP4_GROUPS:
        return _fp4_scheme(weights, _FP4_GROUPS[layout])
    if layout == "mxfp8-quantized":
        _require_floats(weights, 8, _MXFP8_GROUP)
        return _MXFP8
    inputs = group.child("input_activations")
    if group.get("input_activations") is not None:
        _require(inputs, "dynamic", True)
    is_short = (inputs.get("type"), inputs.get("num_bits")) == ("int", 8) and inputs.bool_("symmetric", default=True)
    row_bits = 8 if is_short else 16
    _require(weights, "type", "int")
    _require(weights, "strategy", "group", "channel", "tensor")
    _require(weights, "actorder", *_IN_ORDER, *_ORDERED)
    strategy, is_ordered = weights.get("strategy"), weights.get("actorder") in _ORDERED
    group_size = weights.int_("group_size") if strategy == "group" else None
    if is_ordered and group_size is None:
        raise weights.error("strategy", "'group', because actorder orders groups")
    if layout == "int-quantized":
        _require(weights, "num_bits", 8)
        _require(weights, "symmetric", True)
        return WeightScheme("int8", 8, group_size, is_ordered=is_ordered, row_bits=row_bits)
    _require(weights, "num_bits", 4, 8)
    symmetric = weights.bool_("symmetric", default=True)
    if not symmetric and strategy == "tensor":
        raise weights.error("strategy", "'group' or 'channel' with symmetric=false")
    return WeightScheme("packed", weights.get("num_bits"), group_size, symmetric, is_ordered, row_bits=row_bits)


def _float_scheme(weights: JsonFields, activations: list[JsonFields]) -> WeightScheme:
    """`activations`: none if inputs keep 16 bits."""
    for fields in (weights, *activations):
        _require(fields, "num_bits", 8)
        _require(fields, "type", "float")
        _require(fields, "symmetric", True)
    _require(weights, "strategy", "channel", "tensor", "block")
    for fields in activations:
        _require(fields, "dynamic", True, False)
    block = _block(weights, "block_structure") if weights.get("strategy") == "block" else None
    return WeightScheme("float8", 8, block=block)


def _fp4_scheme(weights: JsonFields, group_size: int) -> WeightScheme:
    """Inputs keep 16 bits, also where the checkpoint was made for inputs of 4 bits: results are nearer to those of the
    model that was quantized."""
    _require_floats(weights, 4, group_size)
    return WeightScheme("fp4", 4, group_size, code="e2m1")


def _require_floats(weights: JsonFields, bits: int, group_size: int) -> None:
    _require(weights, "num_bits", bits)
    _require(weights, "type", "float")
    _require(weights, "symmetric", True)
    _require(weights, "group_size", group_size)


def _modelopt(fields: JsonFields) -> Quantization | None:
    """The files say which layers are quantized, by their scales. Scales for a cache in fp8 aren't used: if only it is
    quantized, `quant_algo` is null."""
    if "quant_algo" in fields and fields.get("quant_algo") is None:
        return None
    schemes = {
        "FP8": WeightScheme("float8", 8),
        "FP8_PER_CHANNEL_PER_TOKEN": WeightScheme("float8", 8),
        "MXFP8": _MXFP8,
        "NVFP4": WeightScheme("fp4", 4, _FP4_GROUPS["nvfp4-pack-quantized"], code="e2m1"),
    }
    _require(fields, "quant_algo", *schemes)
    scheme = schemes[fields.get("quant_algo")]
    _require(fields, "group_size", None, scheme.group_size if scheme.block is None else scheme.block[1])
    return Quantization("modelopt", [("Linear", scheme)])


def _fp8(fields: JsonFields) -> Quantization:
    """The files say which layers are quantized, by their scales: modules_to_not_convert names others by parts of names.

    Where there are no blocks, a layer has one scale. Inputs have one, too, if `activation_scheme` is `static`.
    """
    _require(fields, "activation_scheme", None, "dynamic", "static")
    _require(fields, "fmt", None, "e4m3")
    _require(fields, "expert_dtype", None, "fp8")
    block = None if fields.get("weight_block_size") is None else _block(fields, "weight_block_size")
    return Quantization("fp8", [("Linear", WeightScheme("float8", 8, block=block, scales="weight_scale_inv"))])


def _fbgemm_fp8(fields: JsonFields) -> Quantization:
    """A weight has a scale for each output, and each row of the input has its own, at most `activation_scale_ub`. Here,
    a larger one is taken as it is: then fewer numbers are cut."""
    return Quantization("fbgemm_fp8", [("Linear", WeightScheme("float8", 8))])


def _block(fields: JsonFields, key: str) -> tuple[int, int]:
    sizes = fields.list_(key) or []
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise fields.error(key, "a list of two positive integers")
    return sizes[0], sizes[1]


def _gptq(fields: JsonFields) -> Quantization:
    _refuse_options_of_gptqmodel(fields)
    key = "format" if fields.get("checkpoint_format") is None else "checkpoint_format"
    _require(fields, key, None, "gptq", "gptq_v2")
    _require(fields, "is_marlin_format", None, False)
    _require(fields, "pack_dtype", None, "int32")
    zero_offset = 0 if fields.get(key) == "gptq_v2" else 1
    default = _gptq_scheme(fields, zero_offset)
    targets: list[tuple[str, WeightScheme | None]] = []
    changes = fields.child("dynamic")
    for pattern in changes.values:
        expression = f"re:{pattern.removeprefix('+:').removeprefix('-:')}"
        _check_target(fields, "dynamic", expression)
        changed = None
        if not pattern.startswith("-:"):
            changed = _gptq_scheme(changes.child(pattern).with_defaults(fields.values), zero_offset)
        targets.append((expression, changed))
    return Quantization("gptq", [*targets, ("Linear", default)])


def _gptq_scheme(fields: JsonFields, zero_offset: int) -> WeightScheme:
    _require(fields, "bits", 4, 8)
    is_ordered = fields.bool_("desc_act")
    return WeightScheme("gptq", fields.get("bits"), _group_size(fields), False, is_ordered, zero_offset)


def _awq(fields: JsonFields) -> Quantization:
    _refuse_options_of_gptqmodel(fields)
    key = next((key for key in ("version", "checkpoint_format", "format") if fields.get(key) is not None), "version")
    if str(fields.get(key) or "gemm").lower() != "gemm":
        raise fields.error(key, "'gemm'")
    _require(fields, "w_bit" if "w_bit" in fields else "bits", 4)
    return Quantization("awq", [("Linear", WeightScheme("awq", 4, _group_size(fields), False))])


def _mxfp4(fields: JsonFields) -> Quantization:
    """The files say which experts are quantized: modules_to_not_convert names other layers, too, and none by a rule."""
    return Quantization("mxfp4", [], experts=WeightScheme("mxfp4", 4, MXFP4_GROUP, code="e2m1"))


def _torchao(fields: JsonFields) -> Quantization:
    """The files say which layers are quantized, embeddings included: modules_to_not_convert names others by parts of
    names. Its older versions wrote pickled files only."""
    kinds = fields.child("quant_type")
    if list(kinds.values) != ["default"]:
        raise fields.error("quant_type", "an object with the key 'default' alone")
    config = kinds.child("default")
    if config.get("_type") not in ("FqnToConfig", "ModuleFqnToConfig"):
        return Quantization("torchao", _torchao_classes(_torchao_scheme(config)))
    data = config.child("_data")
    of_names = data.child("fqn_to_config" if data.get("fqn_to_config") else "module_fqn_to_config")
    targets: list[tuple[str, WeightScheme | None]] = []
    # as the tool has it: names come before expressions, the first of which that fits counts
    for name in sorted(of_names.values, key=lambda each: each.startswith("re:")):
        if name != "_default":
            target = name.removesuffix(_WEIGHT).removesuffix(rf"\{_WEIGHT}")
            target = f"re:(?:{target.removeprefix('re:')})$" if name.startswith("re:") else target
            _check_target(of_names, name, target)
            targets.append((target, _torchao_scheme(of_names.child(name)) if of_names.get(name) is not None else None))
    if of_names.get("_default") is not None:
        targets += _torchao_classes(_torchao_scheme(of_names.child("_default")))
    return Quantization("torchao", targets)


def _torchao_classes(scheme: WeightScheme) -> list[tuple[str, WeightScheme | None]]:
    return [(each, scheme) for each in _CLASSES]


def _torchao_scheme(config: JsonFields) -> WeightScheme:
    """Return the scheme of one of the tool's configurations. Inputs in fp8 keep 16 bits: then fewer bits are cut."""
    _require(config, "_type", *_TORCHAO)
    (layout, bits, row_bits), data = _TORCHAO[config.get("_type")], config.child("_data")
    if bits == 4:
        _require(data.child("int4_packing_format"), "_data", "PLAIN")
        return WeightScheme(layout, 4, data.int_("group_size"), code="affine", numbers=_TORCHAO_NUMBERS)
    granularity = _torchao_granularity(data)
    of_weights = granularity.child("_data")
    if layout == "float8":
        _require(data.child("weight_dtype"), "_data", None, "float8_e4m3fn")
        _require(data.child("packing_format"), "_data", None, "PLAIN")
        _require(granularity, "_type", None, "PerRow", "PerTensor", "PerBlock")
        block = _block(of_weights, "block_size") if granularity.get("_type") == "PerBlock" else None
        return WeightScheme(layout, 8, block=block, scales=_TORCHAO_SCALES, numbers=_TORCHAO_NUMBERS)
    _require(data.child("intx_packing_format"), "_data", None, "UNPACKED_TO_INT8")
    _require(granularity, "_type", None, "PerRow", "PerAxis", "PerTensor", "PerGroup")
    group_size = of_weights.int_("group_size") if granularity.get("_type") == "PerGroup" else None
    return WeightScheme(layout, 8, group_size, row_bits=row_bits, numbers=_TORCHAO_NUMBERS)


def _torchao_granularity(data: JsonFields) -> JsonFields:
    """Return how many weights share a scale. In a list, the granularity of inputs comes first."""
    key = "weight_granularity" if "weight_granularity" in data else "granularity"
    several = data.list_(key) if isinstance(data.get(key), list) else None
    return data.child(key) if not several else data.converted(lambda values: values | {key: several[-1]}).child(key)


def _gguf(fields: JsonFields) -> Quantization:
    """What a GGUF file says of itself: the types of layers whose weights can be kept as they are."""
    layers = fields.child("layers")
    for layer in layers.values:
        _require(layers, layer, *GGUF_SCHEMES)
    return Quantization("gguf", [], named={layer: GGUF_SCHEMES[kind] for layer, kind in layers.values.items()})


def _refuse_options_of_gptqmodel(fields: JsonFields) -> None:
    _refuse(fields, "rotation", _ROTATED)
    _refuse(fields, "activation", "quantized activations")


def _group_size(fields: JsonFields) -> int | None:
    key = "group_size" if "q_group_size" not in fields else "q_group_size"
    return None if fields.get(key) == -1 else fields.int_(key)


def _targets(fields: JsonFields, key: str) -> list[str]:
    targets = [str(target) for target in fields.list_(key) or []]
    for target in targets:
        _check_target(fields, key, target)
    return targets


def _check_target(fields: JsonFields, key: str, target: str) -> None:
    if target.startswith("re:"):
        try:
            re.compile(target.removeprefix("re:"))
        except re.error as error:
            raise fields.error(key, f"regular expressions, and {target!r} isn't one: {error}") from error


def _fits(target: str, layer: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), layer) is not None
    return target in (layer, "Embedding" if layer.endswith("embed_tokens") else "Linear")


def _refuse(fields: JsonFields, key: str, feature: str) -> None:
    if fields.get(key):
        raise fields.error(key, f"no value: {feature} aren't supported")


def _require(fields: JsonFields, key: str, *expected: object) -> None:
    if fields.get(key) not in expected:
        raise fields.error(key, _alternatives(expected))


def _alternatives(values: Iterable[object]) -> str:
    names = [str(value).lower() if isinstance(value, bool) else repr(value) for value in values if value is not None]
    return " or ".join(names)
