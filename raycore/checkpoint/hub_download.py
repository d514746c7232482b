"""Downloads checkpoints from the Hugging Face hub into its cache: what raycore reads of them, and nothing else.

The variables HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE count, as for `hf download`. Processes
that download the same file at once wait for each other: huggingface_hub locks each file of the cache.
"""

from __future__ import annotations

__all__ = ["complete_snapshot", "download", "is_complete"]

import logging
import re
import sys
from pathlib import Path
from typing import Any, cast

from raycore.checkpoint.json_fields import JsonFields
from raycore.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE, has_weight_files
from raycore.errors import InvalidCheckpoint

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
    found = _SNAPSHOT.fullmatch(path.parent.parent.name)
    if path.parent.name != "snapshots" or found is None or _COMMIT.fullmatch(path.name) is None:
        return
    file = "config.json"
    if not is_complete(path, file):
        download(f"{found[1]}/{found[2]}", file, path.name, path.parents[2], "model")


def download(name: str, file: str, revision: str | None, cache: Path, of: str) -> Path:
    """Download a checkpoint, or of a tokenizer its small files, and return the directory of its snapshot.

    Args:
        file: a file that it must have. Only if it is `tokenizer.json`, weights aren't downloaded.
        revision: a branch, a tag or a commit. None: main.
        of: the option that has `name` as its value, for errors.

    Raises:
        InvalidCheckpoint: it can't be downloaded, or has no safetensors files. The message says why.
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
        if file not in names:
            raise InvalidCheckpoint(f"{what} has no {file} on {endpoint}: it isn't a {of} that raycore can use")
        wanted, unwanted = [*_SMALL], [*_OTHERS]
        if file != "tokenizer.json":
            weights = [each for each in names if each.endswith(".safetensors") and "/" not in each]
            if not weights:
                raise InvalidCheckpoint(f"{what} has no safetensors files on {endpoint}, and raycore reads no others")
            wanted.append("*.safetensors")
            if any(not each.startswith("consolidated") for each in weights):
                unwanted.append("consolidated*")  # the same weights again
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
