"""The submodules of `vllm`, which are made from the table of names. `vllm.x` is `raycore.compat.vllm.x`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from raycore.compat.names import COMMANDS, MODULES, NAMES, WHOLE, reason

PUBLIC, OWN = "vllm", "raycore.compat.vllm"


def install() -> None:
    """Make `vllm` and all of its submodules importable in this process, as `raycore.compat.vllm`."""
    sys.modules[PUBLIC] = sys.modules[OWN]
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def lookup(module: str, name: str) -> Any:
    """What `name` stands for in a module, whose name is given without the leading `vllm.`.

    Raises:
        AttributeError: raycore has no such name. The message says why.
    """
    home = NAMES.get(module, {}).get(name)
    if home is None:
        raise AttributeError(_missing(module, name), name=name)
    path, _, attribute = home.partition(":")
    found = import_module(path)
    return found if attribute == "*" else getattr(found, attribute or name)


class _Module(ModuleType):
    """A submodule. Its names are imported when they are used."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "raycore under vLLM's names: see raycore.compat.names.")
        self._inner = name.removeprefix(f"{OWN}.")
        self.__all__ = sorted(NAMES.get(self._inner, {}))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in self.__all__:  # Python asks for many that no module has
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name)
        found = lookup(self._inner, name)
        setattr(self, name, found)
        return found


class _Finder(MetaPathFinder):
    """Finds the submodules. Python also asks for `vllm.x.y` if a module `vllm.x` has no `y` to import from it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        prefix = next((each for each in (PUBLIC, OWN) if fullname.startswith(f"{each}.")), None)
        if prefix is None:
            return None
        inner = fullname.removeprefix(f"{prefix}.")
        if inner == "__main__":
            return None  # a file of the package
        if inner not in MODULES:
            # with another name than that of the module, because Python would drop an error of that module
            raise ModuleNotFoundError(_missing(*inner.rpartition(".")[::2]), name=PUBLIC)
        twin = WHOLE.get(inner) if prefix == OWN else f"{OWN}.{inner}"
        loader = _Loader(inner) if twin is None else _TwinLoader(inner, twin)
        # the origin becomes sys.argv[0] of `python -m`
        return ModuleSpec(fullname, loader, origin=__file__, is_package=inner not in COMMANDS)


class _Loader(Loader):
    """Makes a submodule of `raycore.compat.vllm`."""

    def __init__(self, inner: str) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are found when they are used."""

    def get_code(self, fullname: str) -> CodeType:
        """For `python -m`: what a module does that is a command."""
        command = COMMANDS.get(self._inner)
        if command is None:
            raise ImportError(f"vllm.{self._inner} isn't a command", name=fullname)
        lines = f"import sys; from raycore.compat.run import run_command; sys.exit(run_command({command!r}))"
        return compile(lines, f"<{fullname}>", "exec")


class _TwinLoader(_Loader):
    """Imports a module under another name, so that both names mean one module."""

    def __init__(self, inner: str, twin: str) -> None:
        super().__init__(inner)
        self._twin = twin

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._twin)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # Python has just set that of the other name


def _missing(module: str, name: str) -> str:
    place = f"vllm.{module}" if module else "vllm"
    return f"raycore has no {place}.{name}: {reason(f'{module}.{name}' if module else name)}"
