"""`vllm.envs`: the variables of vLLM's environment that are set, as text. raycore itself reads none of them."""

from __future__ import annotations

import os


def __getattr__(name: str) -> str:
    if name.startswith("VLLM_") and name in os.environ:
        return os.environ[name]
    raise AttributeError(f"{name} isn't set, and has no default: raycore reads no variables of vLLM", name=name)
