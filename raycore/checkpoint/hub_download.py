"""Downloads checkpoints from the Hugging Face hub into its cache: what raycore reads of them, and nothing else.

The variables HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE count, as for `hf download`. Processes
that download the same file at once wait for each other: huggingface_hub locks each file of the cache.
"""

from __future__ import annotations

__all__ = ["complete_snapshot", "download", "download_gguf", "is_complete", "kept_snapshot"]

import glob
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from raycore.checkpoint.gguf.choice import choose_files
from raycore.checkpoint.gguf.header import is_gguf, part_names
from raycore.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE, has_weight_files
from raycore.errors import InvalidCheckpoint
from raycore.json_fields import JsonFields

logger = logging.getLogger(__name__)

_SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "merges.txt")
_OTHERS = ("original/*", "onnx/*", "openvino/*", "*/onnx/*")
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_complete(path: Path, file: str) -> bool:
    """Whether the directory of a snapshot has `file`, and all weights, unless `file` is that of a tokenizer."""
    if not (path / file).is_file():
        return False
    if file == "tokenizer.json":
        return True
    index = path / INDEX_FILE
    if (path / SINGLE_FILE).is_file() or not index.is_file():
        return has_weight_files(path)
    return all((path / str(name)).is_file() for name in set(JsonFields.read(index).child("weight_map").values.values()))


def complete_snapshot(path: Path) -> None:
    """Download what this node lacks of a snapshot in the hub's cache. Does nothing for other directories.

    Raises:
        InvalidCheckpoint: it can't be downloaded. The message says why.
    """
    of_snapshot = (each for each in (path, *path.parents) if each.parent.name == "snapshots")
    snapshot = next(of_snapshot, path)
    found = _SNAPSHOT.fullmatch(snapshot.parent.parent.name)
    if snapshot.parent.name != "snapshots" or found is None or _COMMIT.fullmatch(snapshot.name) is None:
        return
    name, cache, file = f"{found[1]}/{found[2]}", snapshot.parents[2], "config.json"
    if is_gguf(path):
        wanted = path.relative_to(snapshot).as_posix()
        if not all((snapshot / each).is_file() for each in part_names(wanted)):
            download_gguf(name, {"file": wanted}, snapshot.name, cache, "model")
    elif not is_complete(path, file):
        download(name, file, path.name, cache, "model")


def download(name: str, file: str, revision: str | None, cache: Path, of: str) -> Path:
    """Download a checkpoint, or of a tokenizer its small files, and return the directory of its snapshot.

    Args:
        file: a file that it must have. Only if it is `tokenizer.json`, weights aren't downloaded.
        revision: a branch, a tag or a commit. None: main.
        of: the option that has `name` as its value, for errors.

    Raises:
        InvalidCheckpoint: it can't be downloaded, or has no safetensors files. The message says why.
    """

    def choose(names: list[str], what: str) -> tuple[list[str], list[str]]:
        gguf = next((each for each in names if each.endswith(".gguf")), None)
        instead = None if gguf is None else f"give one of its GGUF files: {name}/{gguf}"
        if file not in names:
            hint = f", or {instead}" if instead else ""
            raise InvalidCheckpoint(f"{what} has no {file}: it isn't a {of} that raycore can use{hint}")
        wanted, unwanted = [*_SMALL], [*_OTHERS]
        if file != "tokenizer.json":
            weights = [each for each in names if each.endswith(".safetensors") and "/" not in each]
            if not weights:
                raise InvalidCheckpoint(f"{what} has no safetensors files: {instead or 'raycore reads no others'}")
            wanted.append("*.safetensors")
            if any(not each.startswith("consolidated") for each in weights):
                unwanted.append("consolidated*")  # the same weights again
        return wanted, unwanted

    return _download(name, choose, revision, cache, of)


def download_gguf(name: str, choice: dict[str, str | None], revision: str | None, cache: Path, of: str) -> Path:
    """Download a GGUF file, with the other files of its model, and return the first one's path.

    Args:
        choice: which one, as the arguments `file` and `quant` of `choose_files`.

    The others, and the errors, are those of `download`.
    """
    chosen: list[str] = []

    def choose(names: list[str], what: str) -> tuple[list[str], list[str]]:
        chosen.extend(choose_files(names, what, **choice))
        return [glob.escape(each) for each in chosen], []

    return _download(name, choose, revision, cache, of) / chosen[0]


def kept_snapshot(name: str, revision: str | None, cache: Path) -> Path | None:
    """Return the directory of a snapshot in the cache, of which it may have only some files. None: it has none."""
    repository = cache / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision or ""
    kept = repository / "snapshots" / commit
    return kept if commit and kept.is_dir() else None


def _download(
    name: str,
    choose: Callable[[list[str], str], tuple[list[str], list[str]]],
    revision: str | None,
    cache: Path,
    of: str,
) -> Path:
    """Download files of a repository, and return the directory of its snapshot.

    Args:
        choose: gets the names of all files, and what errors call the repository. Returns patterns of the wanted ones,
            and of those among them that aren't wanted.
    """
    # imported lazily: a start from a directory doesn't need it
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"{of}={name!r}{'' if revision is None else f' at revision {revision!r}'}"
    where = f"isn't in the Hugging Face cache {cache}"
    at = "" if revision is None else f" --revision {revision}"
    kept = "" if cache == Path(constants.HF_HUB_CACHE) else f" --cache-dir {cache}"
    command = (
        f"run `hf download {name}{at}{kept}` where the hub can be reached, or give the directory of "
        f"`hf download {name}{at} --local-dir DIR`"
    )
    if constants.HF_HUB_OFFLINE:
        raise InvalidCheckpoint(f"{what} {where}, and HF_HUB_OFFLINE forbids to download it: {command}")
    endpoint = constants.ENDPOINT
    api = HfApi(endpoint=endpoint)
    try:
        info = api.model_info(name, revision=revision, timeout=30)
        names = [each.rfilename for each in info.siblings or []]
        wanted, unwanted = choose(names, f"{what} on {endpoint}")
        logger.warning("downloading %s from %s into %s", name, endpoint, cache)
        # the commit, so that all nodes and processes get the same
        path = Path(
            cast("Any", api).snapshot_download(
                name, revision=info.sha, cache_dir=cache, allow_patterns=wanted, ignore_patterns=unwanted
            )
        )
        _note_branch(path, revision)
        return path
    except GatedRepoError:
        why = "its owner has to grant you access: ask for it on the hub, and set HF_TOKEN"
    except RevisionNotFoundError:
        why = "it has no such revision"
    except RepositoryNotFoundError:
        why = f"{endpoint} has no such model, or it is private and HF_TOKEN isn't set to a token that may read it"
    except HFValidationError as error:
        why = f"it isn't a name of the hub: {error}"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError, *_network_errors()) as error:
        why = f"{_first_line(error)}; {command}"
    raise InvalidCheckpoint(f"{what} {where}, and can't be downloaded: {why}")


def _note_branch(path: Path, revision: str | None) -> None:
    """Note which snapshot a branch or tag is, so that the next start finds it without the network."""
    name = revision or "main"
    if _COMMIT.fullmatch(name) is None:
        reference = path.parent.parent / "refs" / name
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(path.name)


def _network_errors() -> list[type[Exception]]:
    """Those of the library that huggingface_hub has imported for HTTP, which depends on its version."""
    return [sys.modules[name].HTTPError for name in ("httpx", "httpx2") if name in sys.modules]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
