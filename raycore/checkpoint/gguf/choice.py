"""Which of several GGUF files is meant: those of a directory, or of a repository on the hub. Knows only their names."""

from __future__ import annotations

__all__ = ["choose_files", "only_model"]

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from raycore.checkpoint.gguf.header import PART_NAME, SUFFIX, part_names
from raycore.errors import InvalidCheckpoint

_NO_MODEL = re.compile(r".*mmproj.*|(?:.*[-_.])?imatrix(?:_unsloth)?\.gguf", re.IGNORECASE | re.DOTALL)
"""The usual names of files that aren't models: what brings images to one, and matrices by which it was quantized."""
_MAX_NAMED = 8


def only_model(path: Path, is_needed: bool = False) -> Path | None:
    """Return the file of the only model in GGUF files that the directory `path` has, the first one if it has several.
    None: it has no such files, or no models in them and none `is_needed`.

    Raises:
        InvalidCheckpoint: there are several models. Or a model `is_needed`, and there are only other files, or not its
            first one.
    """
    names = sorted(each.name for each in path.iterdir() if each.suffix.lower() == SUFFIX)
    models = _models(names)
    if names and not models and is_needed:
        part = next((name for name in names if PART_NAME.fullmatch(name)), None)
        if part is not None:
            raise InvalidCheckpoint(f"{path} has {part}, and lacks the first file of its model, {part_names(part)[0]}")
        raise InvalidCheckpoint(f"{path} has no model, only {_listed(names)}: give the directory or file of a model")
    if len(models) > 1:
        raise InvalidCheckpoint(f"{path} has {len(models)} GGUF files: give the path of one of {_listed(models)}")
    return path / models[0] if models else None


def choose_files(names: Sequence[str], what: str, *, file: str | None = None, quant: str | None = None) -> list[str]:
    """Return those of a repository's files that a model is in, its first file first.

    Args:
        names: of all files of the repository.
        what: what errors call the repository.
        file: the name of the model's only or first file. None: there is `quant`.
        quant: a type, or the name of a mixture, which the file's name has between hyphens or dots, such as `Q4_K_M`.

    Raises:
        InvalidCheckpoint: there is no such file, or there are several.
    """
    models = _models(names)
    if file is not None:
        found = [each for each in models if each == file]
    else:
        wanted = re.compile(rf"(?:.*[-._/])?{re.escape(quant or '')}(?:[-.].*|/.*)", re.IGNORECASE | re.DOTALL)
        found = [each for each in models if wanted.fullmatch(each)]
    asked = file or quant
    if not found:
        raise InvalidCheckpoint(f"{what} has no GGUF file {asked}: it has {_listed(models)}")
    if len(found) > 1:
        raise InvalidCheckpoint(f"{what} has {len(found)} GGUF files {asked}: name one of {_listed(found)}")
    parts = part_names(found[0])
    missing = sorted(set(parts) - set(names))
    if missing:
        raise InvalidCheckpoint(f"{what} lacks {missing[0]}, one of the {len(parts)} files of {found[0]}")
    return parts


def _models(names: Sequence[str]) -> list[str]:
    """Return the first file of each model."""
    files = [each for each in names if each.lower().endswith(SUFFIX)]
    models = [each for each in files if not _NO_MODEL.fullmatch(PurePosixPath(each).name)]
    return sorted(each for each in models if (found := PART_NAME.fullmatch(each)) is None or int(found[2]) == 1)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return (", ".join(names[:_MAX_NAMED]) or "none") + more
