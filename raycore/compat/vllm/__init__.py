"""raycore under vLLM's names. A script imports this package as `vllm`: `python -m raycore.compat.vllm script.py`.

The submodules have no files. `raycore.compat.names` lists them, with what their names stand for.
"""

from __future__ import annotations

from typing import Any

from raycore.compat.modules import install, lookup
from raycore.compat.names import NAMES, VERSION

__version__ = VERSION
__version_tuple__ = (0, 32, 0)

install()

__all__ = ["__version__", "__version_tuple__", *NAMES[""]]  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    return lookup("", name)
