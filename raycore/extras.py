"""The packages that raycore's extras bring, and the error when one is missing.

raycore imports them where they are needed, so that it runs without them.
"""

from __future__ import annotations

__all__ = ["EXTRAS", "is_installed", "missing_package", "needing"]

import importlib.util
from collections.abc import Generator
from contextlib import contextmanager

from raycore.errors import InvalidInput, MissingPackage

EXTRAS = {
    "structured": {"llguidance": "llguidance"},
    "serve": {
        "fastapi": "fastapi",
        "httptools": "httptools",
        "prometheus_client": "prometheus-client",
        "pydantic": "pydantic",
        "pydantic_core": "pydantic",
        "starlette": "starlette",
        "uvicorn": "uvicorn",
        "uvloop": "uvloop",
    },
    "ray-serve": {"ray.serve": "ray[serve]"},
    "data": {"ray.data": "ray[data]", "pyarrow": "pyarrow"},
    "transformers": {"transformers": "transformers"},
    "gguf": {"gguf": "gguf"},
    "multimodal": {"PIL": "pillow", "transformers": "transformers"},
    "kv-events": {"zmq": "pyzmq"},
    "train": {"transformers": "transformers"},
    "otel": {"opentelemetry": "opentelemetry-sdk", "opentelemetry.exporter": "opentelemetry-exporter-otlp"},
}
"""For each extra in pyproject.toml, the modules that it brings, and the package of each."""


def missing_package(what: str, module: str, extra: str) -> str:
    """Return the error's text.

    Args:
        what: what needs the module: a noun, and the verb "needs" or "need".
        module: the module that couldn't be imported. It may be part of another one that is listed.
        extra: the extra that brings all that `what` needs. If it doesn't bring this module, and others do, the first
            of them counts.
    """
    extra, package = next(
        (
            (name, modules[listed])
            for name in (extra, *EXTRAS)
            for modules in [EXTRAS[name]]
            for listed in sorted(modules, key=len, reverse=True)
            if f"{module}.".startswith(f"{listed}.")
        ),
        (extra, module),
    )
    return f'{what} the package {package}, which isn\'t installed: pip install "raycore[{extra}]"'


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found. Doesn't import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # something has put an unusual value into sys.modules
        return False


def check_installed(what: str, extra: str) -> None:
    """Raise MissingPackage if a package that an extra brings isn't installed. Imports none of them.

    The arguments are those of `missing_package`.
    """
    for module in EXTRAS[extra]:
        if not is_installed(module):
            raise MissingPackage(missing_package(what, module, extra))


@contextmanager
def needing(what: str, extra: str, error: type[InvalidInput] = MissingPackage) -> Generator[None, None, None]:
    """Turn the import of a package that isn't installed into `error`, which names the extra that brings it.

    The arguments are those of `missing_package`.
    """
    try:
        yield
    except ModuleNotFoundError as found:
        if isinstance(found, InvalidInput) or found.name is None or found.name.partition(".")[0] == "raycore":
            raise
        raise error(missing_package(what, found.name, extra)) from None
