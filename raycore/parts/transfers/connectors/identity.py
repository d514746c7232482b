"""The identity of what a rank computes: one value for all that keys, values and embeddings depend on beside the input.

Whatever is kept is found by a digest that begins with this value: blocks of the prefix cache (`kvcache/prefix_cache`),
and with them those in the host's memory, in files and on other ranks, and embeddings of images. So what other weights
have computed can't be found, wherever it is and however it is under way: it is known by another value. What the bytes
of a block mean, and which kernels compute them, is the workers' part of the key: `KVCaches.layout`.

Weights that were read from files have an identity that other engines can have, too. All others have one that nobody
else has: what a trainer calls its weights may come twice, and a digest of all tensors would take longer than an update.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from raycore.checkpoint.gguf.header import part_names
from raycore.config import EngineConfig
from raycore.system import secrets

_SUFFIXES = (".safetensors", ".bin", ".json", ".gguf", ".py")
_SAMPLE_BYTES = 4096
_DIGEST_BYTES = 16


def unique_key() -> str:
    """Return a name for weights that nobody else has."""
    return secrets.token_hex(_DIGEST_BYTES)


class Identity:
    """The identity of one rank's results. All changes of its weights are noted here, on the engine's thread.

    `digest` is the value. What was read and what came since is in it, from the first tensor on that has come.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._shares = config.kv_transfer_config is not None or config.ec_transfer_config is not None
        self.digest = b""
        self.lose()

    def lose(self) -> None:
        """Note that weights change, or that it isn't known which ones there are."""
        self.adopt(unique_key())

    def adopt(self, key: str) -> None:
        """Note that the workers have the weights which all ranks of the engine know by `key`."""
        self.digest = blake2b(key.encode(), digest_size=_DIGEST_BYTES, person=b"key").digest()

    @contextmanager
    def reading(self, path: str | None = None) -> Generator[None, None, None]:
        """The workers read the files of a checkpoint: within this, all of them.

        If files change meanwhile, nobody knows what was read.

        Args:
            path: as the option `model`. None: the engine's own.
        """
        self.lose()
        if not self._shares:
            yield
            return
        before = files_identity(self._config, path)
        yield
        if before is not None and files_identity(self._config, path) == before:
            self.digest = before


def files_identity(config: EngineConfig, path: str | None = None) -> bytes | None:
    """Return another value if a checkpoint's files, or what an engine makes of them, are others.

    None: they can't be read here, or there are none.

    Of files count names, sizes, times and a few samples: reading all would take as long as a start.
    """
    model = config.model
    try:
        files = _files(config, path)
        samples = [_samples(Path(name), size) for name, size, _ in files]
    except OSError:
        return None
    if not files:
        return None
    parts = (
        (files, samples),
        (model.load_format, model.seed if model.load_format == "dummy" else None, model.model_loader_extra_config),
        (model.quantization, model.model_impl, model.hf_overrides),
    )
    return blake2b(msgspec.msgpack.encode(parts), digest_size=_DIGEST_BYTES, person=b"files").digest()


def _files(config: EngineConfig, path: str | None) -> list[tuple[str, int, int]]:
    """Return (path, bytes, time) of all files that a model is made of. Those that are missing aren't there."""
    model = Path(config.model.model if path is None else path)
    described_by = config.model.hf_config_path
    directories = [model] if described_by is None else [model, Path(described_by).expanduser()]
    found: list[tuple[str, int, int]] = []
    for each in directories:
        files = each.iterdir() if each.is_dir() else map(each.with_name, part_names(each.name))
        for file in sorted(file for file in files if file.suffix in _SUFFIXES and not file.is_dir()):
            with suppress(FileNotFoundError):
                status = file.stat()
                found.append((str(file), status.st_size, status.st_mtime_ns))
    return found


def _samples(path: Path, size: int) -> bytes:
    """Return a file's begin, middle and end, each of some thousand bytes at most."""
    with path.open("rb", buffering=0) as file:
        found = b""
        for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            file.seek(start)
            found += file.read(_SAMPLE_BYTES)
    return found
