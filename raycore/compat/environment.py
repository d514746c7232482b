"""`vllm.envs`: the variables of vLLM's environment that are set, as text, and the two that raycore reads."""

from __future__ import annotations

import os
from typing import Any

from raycore.config.given_places import BUNDLES_VARIABLE, GPUS_VARIABLE

OF_RAYCORE: dict[str, Any] = {BUNDLES_VARIABLE: "", GPUS_VARIABLE: 1.0}
"""The variables that raycore reads, and what they are if they aren't set."""


def __getattr__(name: str) -> Any:
    if name in OF_RAYCORE:
        return type(OF_RAYCORE[name])(os.environ.get(name, OF_RAYCORE[name]))
    if name.startswith("VLLM_") and name in os.environ:
        return os.environ[name]
    raise AttributeError(f"{name} isn't set, and has no default: raycore doesn't read it", name=name)
