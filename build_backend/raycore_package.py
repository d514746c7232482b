"""The build backend: setuptools, with the native kernels, which it begins to compile when pip asks for the metadata.

pip then finds out what else to install, which keeps only one core busy, and asks for the wheel after that. PEP 517 and
660 describe the functions that pip calls.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from raycore_build import LIBRARY, RECORD, begin_kernels, build_kernels, compiler_requirement, finish_kernels
from setuptools import Extension, build_meta
from setuptools.build_meta import build_sdist, get_requires_for_build_sdist
from setuptools.command.build_ext import build_ext

__all__ = ["build_sdist", "get_requires_for_build_sdist"]

Settings = dict[str, Any] | None
"""pip's `--config-settings`, for setuptools."""


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    # setuptools would run setup.py to find out that it requires nothing more
    return compiler_requirement()


get_requires_for_build_editable = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    name = build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)
    begin_kernels(Path(metadata_directory), default="auto")
    return name


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    name = build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)
    begin_kernels(Path(metadata_directory), default="all")
    return name


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    BuildKernels.metadata_directory = metadata_directory
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    BuildKernels.metadata_directory = metadata_directory
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


class BuildKernels(build_ext):
    """Setuptools' command for extensions, which setup.py names."""

    metadata_directory: str | None = None
    """What pip got when it asked for the metadata. What was compiled since then lies beside it."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self._default = "all" if self.inplace else "auto"  # editable installations build in place

    def build_extension(self, ext: Extension) -> None:
        self._folder = folder = Path(self.get_ext_fullpath(ext.name)).parent
        folder.mkdir(parents=True, exist_ok=True)
        for name in (LIBRARY, RECORD):
            (folder / name).unlink(missing_ok=True)  # of an earlier build
        begun = finish_kernels(Path(self.metadata_directory).parent) if self.metadata_directory else []
        for path in begun:
            shutil.copyfile(path, folder / path.name)
        if not begun:
            build_kernels(folder, self._default)

    def copy_extensions_to_source(self) -> None:
        """For an editable installation."""
        (ext,) = self.extensions
        package = ext.name.rpartition(".")[0]
        folder = Path(self.get_finalized_command("build_py").get_package_dir(package))
        (folder / LIBRARY).unlink(missing_ok=True)  # of an earlier build
        for path in (self._folder / LIBRARY, self._folder / RECORD):
            if path.exists():
                shutil.copyfile(path, folder / path.name)
