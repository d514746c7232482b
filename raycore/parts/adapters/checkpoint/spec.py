"""A LoRA adapter's description, from its directory as PEFT writes it, or from a GGUF file. Does not import torch.

An adapter adds `scaling · B · A` to the weights of some linear layers of a model, A with a few rows and B with a few
columns. Source: Hu et al., LoRA, 2021 (arXiv:2106.09685). The scaling of rsLoRA is from Kalajdzievski, 2023
(arXiv:2312.03732). `adapter_config.json` has the scaling, `adapter_model.safetensors` the matrices. Files may come from
anywhere, so nothing in them is taken for granted. `raycore.parts.adapters.weights` reads the matrices.
"""

from __future__ import annotations

__all__ = ["ADAPTER_FILE", "CONFIG_FILE", "LoraProjection", "LoraSpec", "ModuleKey"]

import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from raycore.checkpoint.gguf.adapter import GgufAdapter, read_gguf_adapter
from raycore.checkpoint.gguf.header import BLOCKS, SUFFIX, refuse_other_file
from raycore.errors import InvalidAdapter, InvalidCheckpoint, InvalidConfig
from raycore.json_fields import JsonFields, shortened
from raycore.models.mixers.kinds import REFUSED_ADAPTERS
from raycore.models.spec import ModelSpec
from raycore.parts.adapters.checkpoint.peft_options import PeftOptions, read_alpha

CONFIG_FILE = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"

_PICKLE_FILE = "adapter_model.bin"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_HEADER_BYTES = 16 << 20
_GGUF_ALPHA = "adapter.lora.alpha"
"""The scaling times the rank. None or 0: the scaling is 1."""
_DTYPES = ("F32", "BF16", "F16")
_UNSUPPORTED_TENSORS = {
    "lora_magnitude_vector": "DoRA isn't supported",
    "lora_embedding_": "adapters of embeddings aren't supported",
    "lm_head": "adapters of the head aren't supported",
    "embed_tokens": "trained embeddings aren't supported",
    "modules_to_save": "adapters that replace whole modules aren't supported",
    **REFUSED_ADAPTERS,
    "token_embd": "adapters of embeddings aren't supported",
    "output.weight": "adapters of the head aren't supported",
    "_norm.weight": "trained norms aren't supported",
    "_exps": "adapters of experts aren't supported",
    "expert": "adapters of experts aren't supported",
    "bias": "trained biases aren't supported",
}
"""Parts of the names of tensors, and why these tensors are refused."""

_PREFIX = "base_model.model."
_SIDE = r"\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight"  # some tools leave the adapter's name in
_OF_LAYER = r"\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<module>\w+(?:\.\w+)+)"
_IN_NETWORK = re.compile(rf"{re.escape(_PREFIX)}(?P<module>\w+(?:\.\w+)*){_SIDE}", re.DOTALL | re.ASCII)
ModuleKey = tuple[int, str] | str
"""A layer of the model, and a projection of that layer, such as `self_attn.q_proj`. In a network of transformers, the
name of a linear layer."""


class _Matrix(NamedTuple):
    """What a file says of a tensor."""

    dtype: str
    shape: tuple[int, ...]


class LoraProjection(NamedTuple):
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

    modules: dict[ModuleKey, LoraProjection]
    num_parameters: int
    """Number of elements of all matrices of the adapter."""

    @property
    def max_rank(self) -> int:
        """The largest rank of a module."""
        return max(module.rank for module in self.modules.values())

    @staticmethod
    def read(path: Path, model: ModelSpec, max_lora_rank: int) -> LoraSpec:
        """Read the description of the adapter in the directory or the GGUF file `path`, which was trained for `model`.

        The ranks are those of the tensors, which have to agree with the config. `target_modules` isn't looked at.

        Raises:
            InvalidAdapter: the adapter isn't supported, doesn't fit the model, or has a rank above `max_lora_rank`, or
                a file is missing or damaged. The message names the file and the value, and is at most a few thousand
                characters long.
        """
        try:
            if path.suffix.lower() == SUFFIX:
                return _GgufReader(_gguf_file(path), model, max_lora_rank).read()
            config_file, adapter_file = _find_files(path)
            options = PeftOptions.of(JsonFields.read(config_file), model, max_lora_rank)
            return _PeftReader(adapter_file, model, options).read()
        except (InvalidCheckpoint, InvalidConfig) as error:
            raise InvalidAdapter(str(error)) from error


class _Reader(ABC):
    """Reads the header of an adapter's file, and checks that the tensors fit the model."""

    _dtypes = _DTYPES
    """That the tensors may have."""

    def __init__(self, file: Path, model: ModelSpec) -> None:
        self._file = file
        self._model = model
        parts = zip(model.mixers, model.feed_forwards, strict=True)
        self._shapes = [mixer.adapted_shapes(model) | other.adapted_shapes(model) for mixer, other in parts]
        """By layer: the numbers of outputs and inputs of projections, by name."""
        self._known = [*dict.fromkeys(name for own in self._shapes for name in own)]
        self._renamed = {other: name for mixer in model.mixers for other, name in mixer.renamed(model).items()}

    @abstractmethod
    def _parse(self, name: str) -> tuple[ModuleKey, str]:
        """Return what a tensor belongs to, and its side, `A` or `B`."""

    @abstractmethod
    def _rank_and_scaling(self, name: str, shape: tuple[int, ...]) -> tuple[int, float]:
        """Return these for the module whose matrix A is the tensor `name` of this shape."""

    def _spec(self, tensors: Mapping[str, _Matrix]) -> LoraSpec:
        sides: dict[ModuleKey, dict[str, str]] = {}
        for name in sorted(tensors):
            key, side = self._parse(name)
            found = sides.setdefault(key, {})
            if side in found:
                raise self._error(name, f"the file has {shortened(found[side])} for the same matrix")
            found[side] = name
        if not sides:
            raise InvalidAdapter(f"{self._file} has no tensors: expected the matrices lora_A and lora_B of some layers")
        modules = {key: self._module(tensors, key, names) for key, names in sides.items()}
        sizes = [module.rank * sum(self._shape(key)) for key, module in modules.items()]
        return LoraSpec(modules, sum(sizes))

    def _shape(self, key: ModuleKey) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of a module."""
        if isinstance(key, str):
            return self._model.linears[key].num_outputs, self._model.linears[key].num_inputs
        layer, name = key
        return self._shapes[layer][name]

    def _in_layer(self, name: str, found: tuple[int, str, str] | None) -> tuple[ModuleKey, str]:
        """Return the same as `_parse`, for the tensor of a layer, a projection and a side. None: of anything else."""
        module = None if found is None else self._renamed.get(found[1], found[1])
        if found is None or module not in self._known:
            reasons = [reason for part, reason in _UNSUPPORTED_TENSORS.items() if part in name]
            known = f"only lora_A and lora_B of {', '.join(self._known)} are supported"
            raise self._error(name, reasons[0] if reasons else known)
        layer, _, side = found
        if layer >= self._model.num_layers:
            raise self._error(name, f"the model has {self._model.num_layers} layers, from 0 on")
        if module not in self._shapes[layer]:
            is_mixed = any(module in mixer.adapted_shapes(self._model) for mixer in self._model.mixer_kinds)
            instead = (self._model.mixers if is_mixed else self._model.feed_forwards)[layer].described
            raise self._error(name, f"this layer of the model {instead} instead, and has no such projection")
        return (layer, module), side

    def _module(self, tensors: Mapping[str, _Matrix], key: ModuleKey, names: dict[str, str]) -> LoraProjection:
        for side, other in (("A", "B"), ("B", "A")):
            if side not in names:
                raise self._error(names[other], f"the file has no lora_{side} that belongs to it")
        a, b = tensors[names["A"]], tensors[names["B"]]
        rank, scaling = self._rank_and_scaling(names["A"], a.shape)
        num_outputs, num_inputs = self._shape(key)
        self._check_tensor(names["A"], a, (rank, num_inputs), rank)
        self._check_tensor(names["B"], b, (num_outputs, rank), rank)
        return LoraProjection(rank, scaling, names["A"], names["B"])

    def _check_tensor(self, name: str, found: _Matrix, expected: tuple[int, int], rank: int) -> None:
        if found.shape != expected:
            raise self._error(
                name, f"shape {shortened(found.shape)}: expected {expected}, because of r={rank} and the model's sizes"
            )
        if found.dtype not in self._dtypes:
            raise self._error(name, f"dtype {found.dtype}: expected {' or '.join(self._dtypes)}")

    def _error(self, name: str, problem: str) -> InvalidAdapter:
        return InvalidAdapter(f"{self._file}: tensor {shortened(name)}: {problem}")


class _PeftReader(_Reader):
    """Reads a safetensors file, whose tensors have to agree with the options."""

    def __init__(self, file: Path, model: ModelSpec, options: PeftOptions) -> None:
        super().__init__(file, model)
        self._options = options
        # the adapter may have been trained with a version that names the model's layers otherwise than its files
        roots = "|".join(re.escape(each.model) for each in (model.names.roots, *model.names.other_roots))
        layers = f"{re.escape(_PREFIX)}(?:{roots}){re.escape(model.names.layer_list)}"
        self._tensor = re.compile(f"{layers}{_OF_LAYER}{_SIDE}", re.DOTALL | re.ASCII)

    def read(self) -> LoraSpec:
        from safetensors import SafetensorError, safe_open  # imported lazily: most engines don't need it here

        self._check_header_size()
        try:
            opened: Any = safe_open(self._file, framework="numpy")  # has no type annotations
            with opened as file:
                parts: dict[str, Any] = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                return self._spec(
                    {name: _Matrix(part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
                )
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

    def _parse(self, name: str) -> tuple[ModuleKey, str]:
        if self._model.implementation != "raycore":
            return self._in_network(name)
        found = self._tensor.fullmatch(name)
        return self._in_layer(name, found and (int(found["layer"]), found["module"], found["side"]))

    def _in_network(self, name: str) -> tuple[str, str]:
        """Return the same for a network of transformers."""
        found = _IN_NETWORK.fullmatch(name)
        if found is None or found["module"] not in self._model.linears:
            reasons = [reason for part, reason in _UNSUPPORTED_TENSORS.items() if part in name]
            kinds = dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", each) for each in self._model.linears)
            known = f"only lora_A and lora_B of {', '.join(kinds)} are supported in {self._model.architecture}"
            raise self._error(name, reasons[0] if reasons else known)
        return found["module"], found["side"]

    def _rank_and_scaling(self, name: str, shape: tuple[int, ...]) -> tuple[int, float]:
        return self._options.rank_and_scaling(name.removeprefix(_PREFIX).partition(".lora_")[0])


class _GgufReader(_Reader):
    """Reads a GGUF file."""

    _dtypes = tuple(BLOCKS)

    def __init__(self, file: Path, model: ModelSpec, max_rank: int) -> None:
        super().__init__(file, model)
        self._max_rank = max_rank
        self._adapter: GgufAdapter = read_gguf_adapter(file, model)
        has_alpha = self._adapter.metadata.get(_GGUF_ALPHA) is not None
        self._alpha = read_alpha(self._adapter.metadata, _GGUF_ALPHA) if has_alpha else 0.0

    def read(self) -> LoraSpec:
        return self._spec({name: _Matrix(each.dtype, each.shape) for name, each in self._adapter.tensors.items()})

    def _parse(self, name: str) -> tuple[ModuleKey, str]:
        return self._in_layer(name, self._adapter.modules.get(name))

    def _rank_and_scaling(self, name: str, shape: tuple[int, ...]) -> tuple[int, float]:
        rank = shape[0]
        if rank > self._max_rank:
            raise self._error(name, f"{rank} rows are more than max_lora_rank={self._max_rank}: raise max_lora_rank")
        return rank, self._alpha / rank if self._alpha else 1.0


def _find_files(directory: Path) -> tuple[Path, Path]:
    """Return the paths of the config and of the tensors. Raises InvalidAdapter if one isn't a file of usual size."""
    with _naming(directory):
        directory = directory.expanduser()
        try:
            refuse_other_file(directory, shortened(str(directory)))
        except InvalidCheckpoint as error:
            raise InvalidAdapter(str(error)) from None
        if not directory.is_dir():
            raise InvalidAdapter(
                f"{shortened(str(directory))} isn't a directory: give the directory of an adapter, with its "
                f"{CONFIG_FILE} and {ADAPTER_FILE}, or a GGUF file"
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
            _check_regular(file)
        size = files[0].stat().st_size
    if size > _MAX_CONFIG_BYTES:
        raise InvalidAdapter(f"{files[0]} has {size} bytes: expected at most {_MAX_CONFIG_BYTES}")
    return files


def _gguf_file(path: Path) -> Path:
    """Return the path of a GGUF file. Raises InvalidAdapter if it isn't a file."""
    with _naming(path):
        path = path.expanduser()
        if not path.exists():
            raise InvalidAdapter(f"{shortened(str(path))} doesn't exist")
        _check_regular(path)
    return path


def _check_regular(file: Path) -> None:
    # opening a pipe would wait for whoever writes to it
    if not stat.S_ISREG(file.stat().st_mode):
        raise InvalidAdapter(f"{file} isn't a file")


@contextmanager
def _naming(path: Path) -> Generator[None, None, None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # a RuntimeError if there is no home directory
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidAdapter(f"{shortened(str(path))} can't be read: {reason}") from error
