"""A LoRA adapter's description, from its directory as PEFT writes it. Does not import torch or read weights.

An adapter adds `scaling · B · A` to the weights of some linear layers of a model, A with a few rows and B with a few
columns. Source: Hu et al., LoRA, 2021 (arXiv:2106.09685). The scaling of rsLoRA is from Kalajdzievski, 2023
(arXiv:2312.03732). `adapter_config.json` has the scaling, `adapter_model.safetensors` the matrices. Both may come from
anywhere, so nothing in them is taken for granted. `raycore.weights.lora_weights` reads the matrices.
"""

from __future__ import annotations

__all__ = ["ADAPTER_FILE", "CONFIG_FILE", "LoraModule", "LoraSpec", "ModuleKey"]

import math
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from raycore.checkpoint.json_fields import JsonFields, shortened
from raycore.checkpoint.module_patterns import InvalidPattern, ModuleValues
from raycore.checkpoint.rank_rows import LatentRows, RankRows
from raycore.errors import InvalidAdapter, InvalidCheckpoint
from raycore.models.spec import ModelSpec

CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"

_PICKLE_FILE = "adapter_model.bin"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_HEADER_BYTES = 16 << 20
_MAX_ALPHA = 1e6
_DTYPES = ("F32", "BF16", "F16")
_UNSUPPORTED = {
    "use_dora": "DoRA isn't supported",
    "use_qalora": "QALoRA isn't supported",
    "use_bdlora": "block-diagonal LoRA isn't supported",
    "alora_invocation_tokens": "activated LoRA isn't supported",
    "arrow_config": "Arrow's routing between adapters isn't supported",
    "kasa_config": "KaSA isn't supported",
    "monteclora_config": "MonteCLoRA isn't supported",
    "modules_to_save": "adapters that replace whole modules aren't supported",
    "trainable_token_indices": "trained embeddings aren't supported",
    "target_parameters": "adapters of parameters, such as experts', aren't supported",
    "layer_replication": "repeated layers aren't supported",
    "lora_bias": "trained biases aren't supported",
    "fan_in_fan_out": "the model's weights aren't transposed",
}
"""Options that must be absent or false, and why."""
_CHANGED_BASES = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Beginnings of the values of `init_lora_weights` with which PEFT changes the model's own weights."""
_UNSUPPORTED_TENSORS = {
    "lora_magnitude_vector": "DoRA isn't supported",
    "lora_embedding_": "adapters of embeddings aren't supported",
    "lm_head": "adapters of the head aren't supported",
    "embed_tokens": "trained embeddings aren't supported",
    "modules_to_save": "adapters that replace whole modules aren't supported",
    "kv_b_proj": "adapters of kv_b_proj, which attention applies to queries and values, aren't supported",
    "expert": "adapters of experts aren't supported",
    "linear_attn": "adapters of layers that keep a state aren't supported",
    "mamba": "adapters of layers that keep a state aren't supported",
    "bias": "trained biases aren't supported",
}
"""Parts of the names of tensors, and why these tensors are refused."""

_PREFIX = "base_model.model."
_SIDE = r"\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight"  # some tools leave the adapter's name in
_OF_LAYER = r"layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<module>\w+\.\w+)"
_IN_NETWORK = re.compile(rf"{re.escape(_PREFIX)}(?P<module>\w+(?:\.\w+)*){_SIDE}", re.DOTALL | re.ASCII)
ModuleKey = tuple[int, str] | str
"""A layer of the model, and a projection of that layer, such as `self_attn.q_proj`. In a network of transformers, the
name of a linear layer."""
_Number = TypeVar("_Number", int, float)


class LoraModule(NamedTuple):
    """An adapter's part for one projection of one layer."""

    rank: int
    scaling: float
    """What the product of both matrices is multiplied by."""
    a_name: str
    """Name of the tensor A in the file, [rank, inputs]."""
    b_name: str
    """Name of the tensor B in the file, [outputs, rank]."""


@dataclass(frozen=True)
class LoraSpec:
    """The linear layers that an adapter changes. A layer that it doesn't change is absent."""

    modules: dict[ModuleKey, LoraModule]
    num_parameters: int
    """Number of elements of all matrices of the adapter."""

    @property
    def max_rank(self) -> int:
        """The largest rank of a module."""
        return max(module.rank for module in self.modules.values())

    @staticmethod
    def read(path: Path, model: ModelSpec, max_lora_rank: int) -> LoraSpec:
        """Read the description of the adapter in the directory `path`, which was trained for `model`.

        The ranks are those of the tensors, which have to agree with the config. `target_modules` isn't looked at.

        Raises:
            InvalidAdapter: the adapter isn't supported, doesn't fit the model, or has a rank above `max_lora_rank`, or
                a file is missing or damaged. The message names the file and the value, and is at most a few thousand
                characters long.
        """
        try:
            config_file, adapter_file = _find_files(path)
            options = _Options.of(JsonFields.read(config_file), model, max_lora_rank)
            return _Reader(adapter_file, model, options).read()
        except InvalidCheckpoint as error:
            raise InvalidAdapter(str(error)) from error


@dataclass(frozen=True)
class _Options:
    """What adapter_config.json says of ranks and scaling."""

    file: str
    ranks: ModuleValues[int]
    alphas: ModuleValues[float]
    use_rslora: bool
    max_rank: int

    @staticmethod
    def of(config: JsonFields, model: ModelSpec, max_rank: int) -> _Options:
        _refuse_unsupported(config, model)
        return _Options(
            config.source,
            _module_values(config, "r", "rank_pattern", _rank),
            _module_values(config, "lora_alpha", "alpha_pattern", _alpha),
            config.bool_("use_rslora"),
            max_rank,
        )

    def rank_and_scaling(self, module: str) -> tuple[int, float]:
        """Return these for a module with this name in the model."""
        rank, alpha = self.ranks.of(module), self.alphas.of(module)
        if rank > self.max_rank:
            raise InvalidAdapter(
                f"{self.file}: r={rank} for {module} is more than max_lora_rank={self.max_rank}: raise max_lora_rank"
            )
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)


class _Reader:
    """Reads the header of an adapter's file, and checks that the tensors fit the model and the options."""

    def __init__(self, file: Path, model: ModelSpec, options: _Options) -> None:
        self._file = file
        self._model = model
        self._options = options
        self._shapes = _projection_shapes(model)
        # the adapter may have been trained with a version that names the model's layers otherwise than its files
        roots = "|".join(re.escape(each.model) for each in (model.names.roots, *model.names.other_roots))
        self._tensor = re.compile(f"{re.escape(_PREFIX)}(?:{roots}){_OF_LAYER}{_SIDE}", re.DOTALL | re.ASCII)

    def read(self) -> LoraSpec:
        from safetensors import SafetensorError, safe_open  # imported lazily: most engines don't need it here

        self._check_header_size()
        try:
            opened: Any = safe_open(self._file, framework="numpy")  # has no type annotations
            with opened as file:
                return self._spec(file)
        except (SafetensorError, OSError) as error:
            raise InvalidAdapter(
                f"{self._file} can't be read: {shortened(str(error))}. It is damaged or wasn't downloaded completely"
            ) from error

    def _check_header_size(self) -> None:
        # safetensors itself reads a header of up to 100 MB
        try:
            with self._file.open("rb") as file:
                num_bytes = int.from_bytes(file.read(8), "little")
        except OSError as error:
            raise InvalidAdapter(f"{self._file} can't be read: {error.strerror}") from error
        if num_bytes > _MAX_HEADER_BYTES:
            raise InvalidAdapter(
                f"{self._file} isn't a safetensors file of an adapter: its header has {num_bytes} bytes, more than the "
                f"{_MAX_HEADER_BYTES} of the largest adapters"
            )

    def _spec(self, file: Any) -> LoraSpec:
        parse = self._parse_name if self._model.implementation == "raycore" else self._parse_network_name
        sides: dict[ModuleKey, dict[str, str]] = {}
        for name in sorted(file.keys()):
            key, side = parse(name)
            found = sides.setdefault(key, {})
            if side in found:
                raise self._error(name, f"the file has {shortened(found[side])} for the same matrix")
            found[side] = name
        if not sides:
            raise InvalidAdapter(f"{self._file} has no tensors: expected the matrices lora_A and lora_B of some layers")
        modules = {key: self._module(file, key, names) for key, names in sides.items()}
        sizes = [module.rank * sum(self._shape(key)) for key, module in modules.items()]
        return LoraSpec(modules, sum(sizes))

    def _shape(self, key: ModuleKey) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of a module."""
        if isinstance(key, str):
            return self._model.linears[key].num_outputs, self._model.linears[key].num_inputs
        return self._shapes[key[1]]

    def _parse_network_name(self, name: str) -> tuple[str, str]:
        """Return the linear layer and the side of a tensor, for a network of transformers."""
        found = _IN_NETWORK.fullmatch(name)
        if found is None or found["module"] not in self._model.linears:
            reasons = [reason for part, reason in _UNSUPPORTED_TENSORS.items() if part in name]
            kinds = dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", each) for each in self._model.linears)
            known = f"only lora_A and lora_B of {', '.join(kinds)} are supported in {self._model.architecture}"
            raise self._error(name, reasons[0] if reasons else known)
        return found["module"], found["side"]

    def _parse_name(self, name: str) -> tuple[tuple[int, str], str]:
        """Return the layer with the projection, and the side of a tensor."""
        found = self._tensor.fullmatch(name)
        if found is None or found["module"] not in self._shapes:
            reasons = [reason for part, reason in _UNSUPPORTED_TENSORS.items() if part in name]
            known = f"only lora_A and lora_B of {', '.join(self._shapes)} are supported"
            raise self._error(name, reasons[0] if reasons else known)
        layer, module = int(found["layer"]), found["module"]
        if layer >= self._model.num_layers:
            raise self._error(name, f"the model has {self._model.num_layers} layers, from 0 on")
        if module.startswith("self_attn.") and self._model.has_state(layer):
            raise self._error(name, "this layer of the model keeps a state instead, and has no such projection")
        moe = self._model.moe
        if module.startswith("mlp.") and moe is not None and moe.sparse_layers[layer]:
            raise self._error(name, "this layer of the model has experts, and adapters of experts aren't supported")
        return (layer, module), found["side"]

    def _module(self, file: Any, key: ModuleKey, names: dict[str, str]) -> LoraModule:
        for side, other in (("A", "B"), ("B", "A")):
            if side not in names:
                raise self._error(names[other], f"the file has no lora_{side} that belongs to it")
        rank, scaling = self._options.rank_and_scaling(names["A"].removeprefix(_PREFIX).partition(".lora_")[0])
        num_outputs, num_inputs = self._shape(key)
        self._check_tensor(file, names["A"], (rank, num_inputs), rank)
        self._check_tensor(file, names["B"], (num_outputs, rank), rank)
        return LoraModule(rank, scaling, names["A"], names["B"])

    def _check_tensor(self, file: Any, name: str, expected: tuple[int, int], rank: int) -> None:
        part: Any = file.get_slice(name)
        shape = tuple(part.get_shape())
        if shape != expected:
            raise self._error(
                name, f"shape {shortened(shape)}: expected {expected}, because of r={rank} and the model's sizes"
            )
        if part.get_dtype() not in _DTYPES:
            raise self._error(name, f"dtype {part.get_dtype()}: expected {' or '.join(_DTYPES)}")

    def _error(self, name: str, problem: str) -> InvalidAdapter:
        return InvalidAdapter(f"{self._file}: tensor {shortened(name)}: {problem}")


def _find_files(directory: Path) -> tuple[Path, Path]:
    """Return the paths of the config and of the tensors. Raises InvalidAdapter if one isn't a file of usual size."""
    try:
        directory = directory.expanduser()
        if not directory.is_dir():
            raise InvalidAdapter(
                f"{shortened(str(directory))} isn't a directory: give the directory of an adapter, with its "
                f"{CONFIG_FILE} and {ADAPTER_FILE}"
            )
        files = directory / CONFIG_FILE, directory / ADAPTER_FILE
        if not files[1].exists() and (directory / _PICKLE_FILE).exists():
            raise InvalidAdapter(
                f"{directory} has {_PICKLE_FILE} instead of {ADAPTER_FILE}: it isn't read, because such files can run "
                "code. Save the adapter as safetensors"
            )
        for file in files:
            if not file.exists():
                raise InvalidAdapter(f"{file} doesn't exist: it is one of the files of an adapter that PEFT saved")
            # opening a pipe would wait for whoever writes to it
            if not stat.S_ISREG(file.stat().st_mode):
                raise InvalidAdapter(f"{file} isn't a file")
        size = files[0].stat().st_size
    except (OSError, RuntimeError) as error:  # a RuntimeError if there is no home directory
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidAdapter(f"{shortened(str(directory))} can't be read: {reason}") from error
    if size > _MAX_CONFIG_BYTES:
        raise InvalidAdapter(f"{files[0]} has {size} bytes: expected at most {_MAX_CONFIG_BYTES}")
    return files


def _refuse_unsupported(config: JsonFields, model: ModelSpec) -> None:
    if config.get("peft_type") != "LORA":
        raise config.error("peft_type", "'LORA'")
    for key, reason in _UNSUPPORTED.items():
        # transformers' code has transposed weights, too, and PEFT writes the same matrices for both
        is_known = key == "fan_in_fan_out" and model.implementation == "transformers"
        if config.get(key) and not is_known:
            raise config.error(key, f"no value, because {reason}")
    if config.get("bias") not in (None, "none"):
        raise config.error("bias", "'none', because trained biases aren't supported")
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_CHANGED_BASES):
        raise config.error(
            "init_lora_weights",
            "an adapter for the model's own weights. Convert it: give PEFT's save_pretrained() the option "
            "path_initial_model_for_weight_conversion",
        )


def _module_values(
    config: JsonFields, key: str, pattern_key: str, number: Callable[[JsonFields, str], _Number]
) -> ModuleValues[_Number]:
    """Return the numbers for modules: those of the patterns at `pattern_key`, and for other modules that at `key`."""
    patterns = config.child(pattern_key)
    try:
        return ModuleValues({name: number(patterns, name) for name in patterns.values}, number(config, key))
    except InvalidPattern as error:
        raise config.error(pattern_key, str(error)) from error


def _rank(fields: JsonFields, key: str) -> int:
    return fields.int_(key)


def _alpha(fields: JsonFields, key: str) -> float:
    value: object = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_ALPHA:
        raise fields.error(key, f"a number from {-_MAX_ALPHA:.0f} to {_MAX_ALPHA:.0f}")
    return float(value)


def _projection_shapes(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the numbers of outputs and inputs of a layer's projections, by name."""
    rows, hidden = RankRows.of(model, 0, 1), model.hidden_size
    first, read_by_o = rows.qkv, rows.heads
    more: dict[str, tuple[int, int]] = {}
    if model.latent is not None:
        own = LatentRows.of(model, 0, 1)
        first, read_by_o = own.inputs, own.values
        if own.q_b is not None and model.latent.query_rank is not None:
            more[own.q_b.name] = own.q_b.total, model.latent.query_rank
    by_rows = {each.name: (each.num_stored, hidden) for each in (*first, *rows.gate_up)}
    return by_rows | more | {model.names.o: (hidden, read_by_o.total), model.names.down: (hidden, rows.gate.total)}
