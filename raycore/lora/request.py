"""Which LoRA adapter a request uses. The class, its fields and their order are vLLM's."""

from __future__ import annotations

__all__ = ["LoRARequest"]

from collections.abc import Callable

import msgspec

from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.sampling_params import MAX_INT, is_encodable
from raycore.short_tracebacks import ends_traceback


class LoRARequest(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """An adapter that a request uses. The same adapter has the same name and number in all requests.

    Raises:
        InvalidRequest: from the constructor, if a value is invalid. The message names it.
    """

    lora_name: str
    """The adapter's name, which isn't empty."""
    lora_int_id: int
    """The adapter's number, from 1 on."""
    lora_path: str = ""
    """The adapter's directory, with `adapter_config.json` and `adapter_model.safetensors`, or a GGUF file. Has to be
    given."""
    base_model_name: str | None = None
    """No effect: an adapter says itself what it is made for."""
    load_inplace: bool = False
    """Whether `LLM.add_lora` replaces the adapter with this name and number by what is in the directory now."""
    is_3d_lora_weight: bool = False
    """No effect: the files say how an adapter's tensors are stored."""

    @ends_traceback
    def __post_init__(self) -> None:
        _check("lora_name", self.lora_name, _is_text, "a string of Unicode characters that isn't empty")
        _check("lora_int_id", self.lora_int_id, _is_id, f"an integer from 1 to {MAX_INT}")
        _check("lora_path", self.lora_path, _is_text, "a string of Unicode characters that isn't empty")
        _check("load_inplace", self.load_inplace, _is_flag, "True or False")
        _check("is_3d_lora_weight", self.is_3d_lora_weight, _is_flag, "True or False")
        if self.base_model_name is not None:
            _check("base_model_name", self.base_model_name, _is_text, "a string that isn't empty, or None")

    def __eq__(self, other: object) -> bool:
        """Whether both ask for the same: fields without effect don't count."""
        return isinstance(other, LoRARequest) and self._asked == other._asked

    def __ne__(self, other: object) -> bool:
        return not self == other  # Struct's own compares identities

    def __hash__(self) -> int:
        return hash(self._asked)

    @property
    def _asked(self) -> tuple[str, int, str, bool]:
        return self.lora_name, self.lora_int_id, self.lora_path, self.load_inplace

    @property
    def name(self) -> str:
        """The same as `lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """The same as `lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """The same as `lora_path`."""
        return self.lora_path


def _check(name: str, value: object, is_valid: Callable[[object], bool], expected: str) -> None:
    if not is_valid(value):
        raise InvalidRequest(f"{name}={shortened(value)}: expected {expected}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != "" and is_encodable(value)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_INT
