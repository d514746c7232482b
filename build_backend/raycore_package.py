"""The build backend: what pip calls to make wheels and source archives of what pyproject.toml says.

Setuptools would do that, too. But pip would install it for each build, and run it three times: some five seconds of
processor time.

See https://packaging.python.org/specifications for the formats, and PEP 517 and 660 for the functions that pip calls.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import shutil
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raycore_build import LIBRARY, RECORD, begin_kernels, build_kernels, compiler_requirement, finish_kernels

ROOT = Path(__file__).parents[1]
PACKAGES = ("raycore", "placement")
KERNELS = "raycore/kernels"
OF_A_BUILD = (f"{KERNELS}/{LIBRARY}", f"{KERNELS}/{RECORD}")
"""They lie among the sources after an editable installation."""

Files = dict[str, "bytes | Path"]
"""Contents by names in an archive."""
Settings = "dict[str, Any] | None"
"""pip's `--config-settings`. There are none."""


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    with _kernels(metadata_directory, default="auto") as kernels:
        # the kernels' sources aren't needed once they are compiled
        files = {name: path for name, path in _package_files() if "csrc" not in path.parts}
        files |= {f"{KERNELS}/{path.name}": path for path in kernels}
        return _write_wheel(Path(wheel_directory), platform_tag(), files)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    with _kernels(metadata_directory, default="all") as kernels:
        for name in OF_A_BUILD:
            (ROOT / name).unlink(missing_ok=True)  # of an earlier build
        for path in kernels:
            shutil.copyfile(path, ROOT / KERNELS / path.name)
    # puts this folder on the import path, where it goes before a folder called raycore that lies beside the program
    files: Files = {"__editable__.raycore.pth": f"{ROOT}\n".encode()}
    return _write_wheel(Path(wheel_directory), platform_tag(), files)


@contextmanager
def _kernels(metadata_directory: str | None, default: str) -> Generator[list[Path], None, None]:
    """The files of the kernels, which may have been begun when pip asked for the metadata."""
    with tempfile.TemporaryDirectory() as folder:
        begun = finish_kernels(Path(metadata_directory).parent) if metadata_directory else []
        yield begun or build_kernels(Path(folder), default)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    said = project()
    name = f"{said['name']}-{said['version']}"
    others = [ROOT / other for other in ("pyproject.toml", said["readme"], *said["license-files"])]
    others += sorted((ROOT / "build_backend").glob("*.py"))
    files = {path.relative_to(ROOT).as_posix(): path for path in others} | dict(_package_files())
    with tarfile.open(Path(sdist_directory) / f"{name}.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        info, content = tarfile.TarInfo(f"{name}/PKG-INFO"), metadata(said).encode()
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
        for path, source in files.items():
            archive.add(str(source), f"{name}/{path}")
    return f"{name}.tar.gz"


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    return _prepare_metadata(Path(metadata_directory), default="auto")


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    return _prepare_metadata(Path(metadata_directory), default="all")


def _prepare_metadata(folder: Path, default: str) -> str:
    for name, content in dist_info(platform_tag()).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    begin_kernels(folder, default)
    return dist_info_folder(project())


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*get_requires_for_build_sdist(), *compiler_requirement()]


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return [] if sys.version_info >= (3, 11) else ["tomli>=2"]


get_requires_for_build_editable = get_requires_for_build_wheel


def project() -> dict[str, Any]:
    """What pyproject.toml says of raycore."""
    # not at the top: pip installs tomli after it has asked what a build requires
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _package_files() -> Iterator[tuple[str, Path]]:
    """The files of raycore's packages, by their names in a wheel."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            is_hidden = any(part.startswith(".") for part in path.relative_to(ROOT).parts)
            if path.is_file() and not is_hidden and "__pycache__" not in path.parts and name not in OF_A_BUILD:
                yield name, path


def dist_info(tag: str) -> Files:
    """The files that describe an installation. `tag`: what a wheel is for."""
    said = project()
    wheel = ["Wheel-Version: 1.0", "Generator: raycore", "Root-Is-Purelib: false", f"Tag: {tag}", ""]
    scripts = ["[console_scripts]", *(f"{name} = {target}" for name, target in said["scripts"].items()), ""]
    files: Files = {"METADATA": metadata(said).encode(), "WHEEL": "\n".join(wheel).encode()}
    files["entry_points.txt"] = "\n".join(scripts).encode()
    files |= {f"licenses/{name}": ROOT / name for name in said["license-files"]}
    return {f"{dist_info_folder(said)}/{name}": content for name, content in files.items()}


def dist_info_folder(said: dict[str, Any]) -> str:
    return f"{said['name']}-{said['version']}.dist-info"


def metadata(said: dict[str, Any]) -> str:
    """Of pyproject.toml's `project`."""
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {said['name']}",
        f"Version: {said['version']}",
        f"Summary: {said['description']}",
        f"License-Expression: {said['license']}",
        *(f"License-File: {name}" for name in said["license-files"]),
        f"Requires-Python: {said['requires-python']}",
        *(f"Requires-Dist: {requirement}" for requirement in said["dependencies"]),
    ]
    for extra, requirements in said["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        for requirement in requirements:
            needed, _, marker = (part.strip() for part in requirement.partition(";"))
            condition = f'({marker}) and extra == "{extra}"' if marker else f'extra == "{extra}"'
            lines.append(f"Requires-Dist: {needed}; {condition}")
    readme = (ROOT / said["readme"]).read_text(encoding="utf-8")
    return "\n".join([*lines, "Description-Content-Type: text/markdown", "", readme])


def platform_tag() -> str:
    """Of a wheel with kernels for machines of this kind, which serves every version of Python."""
    return f"cp310-abi3-{re.sub('[-.]', '_', sysconfig.get_platform())}"


def _write_wheel(folder: Path, tag: str, files: Files) -> str:
    """Returns the name of the wheel's file."""
    said = project()
    name = f"{said['name']}-{said['version']}-{tag}.whl"
    record_name = f"{dist_info_folder(said)}/RECORD"
    record: list[str] = []
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path, content in (files | dist_info(tag)).items():
            if isinstance(content, Path):
                archive.write(content, path)
                content = content.read_bytes()
            else:
                archive.writestr(path, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(content)}")
        archive.writestr(record_name, "\n".join([*record, f"{record_name},,", ""]))
    return name
