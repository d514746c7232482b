"""Finds checkpoints by their names on the Hugging Face hub, in the cache of what has been downloaded.

What it lacks is downloaded. The variables HF_HOME and HF_HUB_CACHE say where the cache is.
"""

from __future__ import annotations

__all__ = ["find_directory"]

import re
from pathlib import Path

from raycore.checkpoint.gguf.choice import choose_files, only_model
from raycore.checkpoint.gguf.header import is_gguf, refuse_other_file
from raycore.errors import InvalidCheckpoint, InvalidConfig

_NAME = r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}"
_HUB_NAME = re.compile(_NAME, re.ASCII)
_GGUF_NAME = re.compile(rf"({_NAME})(?::([\w.-]+)|/([^:]+\.gguf))", re.ASCII)
"""A repository, and the type or the name of one of its GGUF files."""


def find_directory(
    name: str, file: str = "config.json", revision: str | None = None, cache: str | None = None, of: str = "model"
) -> Path:
    """Return the directory of a checkpoint: `name` itself, or the one in the cache if `name` is one of the hub's. For a
    GGUF file, return its path: also for a directory that has nothing else, and for `owner/repository:TYPE` and
    `owner/repository/FILE.gguf`.

    What the cache lacks is downloaded.

    Args:
        file: a file that every such checkpoint has.
        revision: a branch, a tag or a commit. None: main.
        cache: the cache's directory. None: that of the environment.
        of: the option that has `name` as its value, for errors.

    Raises:
        InvalidCheckpoint: there is no such GGUF file, or there are several, or `name` is another file. Or it could be
            the hub's, and can't be downloaded. The message says why.
        InvalidConfig: there is a revision, and `name` is a directory or can't be the hub's.
    """
    path = Path(name).expanduser()
    refuse_other_file(path, f"{of}={name!r}")
    on_hub = None if path.exists() else _GGUF_NAME.fullmatch(name)
    if on_hub is not None:
        return _gguf_of_hub(name, on_hub, revision, cache, of)
    if is_gguf(path) and revision is None:
        if not path.is_file():
            raise InvalidCheckpoint(f"{of}={name!r}: there is no such file")
        return path
    if path.is_dir() and revision is None:
        return _gguf_in(path, file) or path
    is_on_hub = not path.is_dir() and _HUB_NAME.fullmatch(name) is not None
    if not is_on_hub:
        if revision is not None:
            option = "revision" if of == "model" else f"{of}_revision"
            raise InvalidConfig(f"{option}={revision!r} is for names on the hub, and {of}={name!r} isn't one: omit it")
        return path
    # imported lazily: a start from a directory doesn't need it
    from huggingface_hub import constants, try_to_load_from_cache

    directory = Path(cache or constants.HF_HUB_CACHE).expanduser()
    try:
        found = try_to_load_from_cache(name, file, directory, revision)
    except ValueError:  # the hub has no such names
        found = None
    from raycore.checkpoint.hub_download import download, is_complete

    kept = Path(found).parent if isinstance(found, str) else None
    if kept is not None and is_complete(kept, file):
        return kept
    try:
        return download(name, file, revision, directory, of)
    except InvalidCheckpoint as error:
        if kept is not None:
            return kept  # workers may have the weights
        raise InvalidCheckpoint(f"{of}={name!r} isn't a directory. {error}") from None


def _gguf_in(path: Path, file: str) -> Path | None:
    """Return the GGUF file that a directory has instead of `file`, or instead of weights in other files."""
    if file == "config.json":
        has_others = any(path.glob("*.safetensors"))
    elif file == "tokenizer.json":
        has_others = (path / file).is_file()
    else:
        return None
    return None if has_others else only_model(path, is_needed=not (path / file).is_file())


def _gguf_of_hub(name: str, found: re.Match[str], revision: str | None, cache: str | None, of: str) -> Path:
    # imported lazily: a start from a directory doesn't need them
    from huggingface_hub import constants

    from raycore.checkpoint.hub_download import download_gguf, kept_snapshot

    directory, choice = Path(cache or constants.HF_HUB_CACHE).expanduser(), {"quant": found[2], "file": found[3]}
    kept = kept_snapshot(found[1], revision, directory)
    if kept is not None:
        names = [each.relative_to(kept).as_posix() for each in kept.rglob("*") if each.is_file()]
        try:
            return kept / choose_files(names, str(kept), **choice)[0]
        except InvalidCheckpoint:
            pass  # the hub may have it
    try:
        return download_gguf(found[1], choice, revision, directory, of)
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{of}={name!r} isn't a file. {error}") from None
