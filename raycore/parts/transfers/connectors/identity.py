"""The identity of what a rank computes: one value for all that keys, values and embeddings depend on beside the input.

Whatever is kept is found by a digest that begins with this value: blocks of the prefix cache (`kvcache/prefix_cache`),
and with them those in the host's memory, in files and on other ranks, and embeddings of images. So what other weights
have computed can't be found, wherever it is and however it is under way: it is known by another value. What the bytes
of a block mean, and which kernels compute them, is the workers' part of the key: `KVCaches.layout`.

Weights that were read from files have an identity that other engines can have, too: that of the files' content,
wherever a copy is. All others have one that nobody else has: what a trainer calls its weights may come twice, and a
digest of all tensors would take longer than an update.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import msgspec

from raycore.checkpoint.gguf.header import part_names
from raycore.checkpoint.weight_files import read_header
from raycore.config import EngineConfig
from raycore.errors import InvalidCheckpoint
from raycore.system import secrets

_SUFFIXES = (".safetensors", ".bin", ".json", ".gguf", ".py")
_SAMPLE_BYTES = 256
_MOST_SAMPLES = 4096
"""Of all files together, besides the two of each tensor."""
_LEAST_APART = 4096
"""Bytes from one sample to the next. What is shorter is read whole."""
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
        before = _states(self._config, path)
        yield
        # now the files are in the page cache, so that samples take no time
        found = files_identity(self._config, path)
        if found is not None and _states(self._config, path) == before:
            self.digest = found


def files_identity(config: EngineConfig, path: str | None = None) -> bytes | None:
    """Return another value if the content of a checkpoint's files, or what an engine makes of them, is another one.

    None: they can't be read here, or there are none.

    Of files count names, sizes, safetensors' headers, and samples, at least two of each tensor: reading all would take
    as long as a start. Where they are and how old they are doesn't count, so copies have the same value.
    """
    model = config.model
    try:
        files = [[(file, file.stat().st_size) for file in each] for each in _files(config, path)]
        apart = max(_LEAST_APART, sum(size for each in files for _, size in each) // _MOST_SAMPLES)
        contents = [[(file.name, size, _content(file, size, apart)) for file, size in each] for each in files]
    except OSError:
        return None
    if not any(contents):
        return None
    parts = (
        contents,
        (model.load_format, model.seed if model.load_format == "dummy" else None, model.model_loader_extra_config),
        (model.quantization, model.model_impl, model.hf_overrides),
        # the default adds nothing, so that blocks that were kept before there was this option are found
        *(() if model.cpu_activation_dtype == "auto" else (model.cpu_activation_dtype,)),
    )
    return blake2b(msgspec.msgpack.encode(parts), digest_size=_DIGEST_BYTES, person=b"files").digest()


def _files(config: EngineConfig, path: str | None) -> list[list[Path]]:
    """Return all files that a model is made of, by directory. Those that are missing aren't there."""
    model = Path(config.model.model if path is None else path)
    described_by = config.model.hf_config_path
    directories = [model] if described_by is None else [model, Path(described_by).expanduser()]
    return [
        sorted(
            file
            for file in (each.iterdir() if each.is_dir() else map(each.with_name, part_names(each.name)))
            if file.suffix in _SUFFIXES and file.is_file()
        )
        for each in directories
    ]


def _states(config: EngineConfig, path: str | None) -> list[tuple[str, int, int]]:
    """Return what tells whether files were changed: names, sizes and times."""
    try:
        found = [(str(file), file.stat()) for each in _files(config, path) for file in each]
    except OSError:
        return []
    return [(name, status.st_size, status.st_mtime_ns) for name, status in found]


def _content(file: Path, size: int, apart: int) -> bytes:
    """Return a digest of a file's header and of samples of its tensors, `apart` bytes from each other."""
    try:
        tensors = read_header(file).values() if file.suffix == ".safetensors" else ()
    except InvalidCheckpoint:  # whoever reads it says so
        tensors = ()
    ranges = sorted((tensor.start, tensor.end) for tensor in tensors) or [(0, size)]
    digest = blake2b(digest_size=_DIGEST_BYTES)
    with file.open("rb", buffering=0) as opened:
        digest.update(opened.read(ranges[0][0]))
        for start, end in ranges:
            is_short = end - start <= _LEAST_APART
            for at in [start] if is_short else [*range(start, end - _SAMPLE_BYTES, apart), end - _SAMPLE_BYTES]:
                opened.seek(at)
                digest.update(opened.read(end - start if is_short else _SAMPLE_BYTES))
    return digest.digest()
