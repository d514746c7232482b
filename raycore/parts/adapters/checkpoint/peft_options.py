"""What `adapter_config.json` of a LoRA adapter says, as PEFT writes it. Nothing in it is taken for granted."""

from __future__ import annotations

__all__ = ["PeftOptions", "read_alpha"]

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from raycore.checkpoint.module_patterns import InvalidPattern, ModuleValues
from raycore.errors import InvalidAdapter
from raycore.json_fields import JsonFields
from raycore.models.spec import ModelSpec

_MAX_ALPHA = 1e6
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
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class PeftOptions:
    """What adapter_config.json says of ranks and scaling."""

    file: str
    ranks: ModuleValues[int]
    alphas: ModuleValues[float]
    use_rslora: bool
    max_rank: int

    @staticmethod
    def of(config: JsonFields, model: ModelSpec, max_rank: int) -> PeftOptions:
        """Read them. Raises InvalidCheckpoint if a value is wrong, or asks for what raycore doesn't support."""
        _refuse_unsupported(config, model)
        return PeftOptions(
            config.source,
            _module_values(config, "r", "rank_pattern", _rank),
            _module_values(config, "lora_alpha", "alpha_pattern", read_alpha),
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


def read_alpha(fields: JsonFields, key: str) -> float:
    """Return the number at `key`. Raises InvalidCheckpoint if it is none, or a very large one."""
    value: object = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_ALPHA:
        raise fields.error(key, f"a number from {-_MAX_ALPHA:.0f} to {_MAX_ALPHA:.0f}")
    return float(value)
