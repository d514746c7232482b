"""Embeddings of images in host memory and in a directory, so that an image is encoded once.

An encoder cache drops embeddings when it needs their space. A store keeps copies, by names which include everything
that embeddings depend on but how a worker computes: image, processing, and weights (`identity.py`).
Files have checksums: a damaged one is a miss.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from raycore.class_paths import import_class
from raycore.errors import InvalidConfig
from raycore.parts.transfers.config.ec_transfer import ECStoreSettings, ECTransferConfig
from raycore.parts.transfers.connectors.names_seen import NamesSeen
from raycore.parts.transfers.connectors.offload.files import BlockFiles
from raycore.plugins import EC_CONNECTORS

_DIGEST_BYTES = 16


class EmbeddingStore:
    """One worker's store. All methods are called on its thread.

    `ec_connector` may name a subclass, with the same constructor.
    """

    files_class: ClassVar[type[BlockFiles]] = BlockFiles

    def __init__(self, config: ECTransferConfig, model: str, *, writes_files: bool = True) -> None:
        """
        Args:
            model: a text that is another one where embeddings have other types or other kernels.
            writes_files: whether this worker writes to the directory. One of those with equal embeddings does.

        Raises:
            InvalidConfig: the directory can't be written.
        """
        self._config = config
        self._settings: ECStoreSettings = config.ec_connector_extra_config
        self._model = model
        self._writes_files = writes_files
        self._held: OrderedDict[bytes, NDArray[np.uint8]] = OrderedDict()
        """In host memory, the least recently used ones first."""
        self._num_bytes = 0
        self._files: dict[int, BlockFiles] = {}
        """By number of bytes of an embedding."""
        self.num_loaded = 0
        self.num_saved = 0
        self._names = NamesSeen(None)
        if self._settings.path is not None and writes_files:
            self._files_of(0).check()
            self._names = NamesSeen(Path(self._settings.path))

    def load(self, name: str, num_bytes: int) -> NDArray[np.uint8] | None:
        """Return the embeddings of an image, uint8[num_bytes]. None: they aren't here.

        `name`: the identity of the weights and, after a space, that of the image.
        """
        if not self._config.loads:
            return None
        digest = self._digest(name)
        found = self._held.get(digest)
        if found is not None and len(found) == num_bytes:
            self._held.move_to_end(digest)
        else:
            found = self._read(digest, num_bytes)
        self.num_loaded += found is not None
        if found is None and not self._config.saves:
            self._names.missed(self._maker(name))
        return found

    def save(self, name: str, data: NDArray[np.uint8]) -> None:
        """Keep a copy of the embeddings of an image. What can't be written to the directory isn't there."""
        if not self._config.saves:
            return
        digest = self._digest(name)
        self._hold(digest, data)
        if self._settings.path is not None and self._writes_files:
            self._files_of(len(data)).write(digest, data)
            self._names.saved(self._maker(name))
        self.num_saved += 1

    def _read(self, digest: bytes, num_bytes: int) -> NDArray[np.uint8] | None:
        if self._settings.path is None:
            return None
        data = np.empty(num_bytes, np.uint8)
        if not self._files_of(num_bytes).read(digest, [data.data]):
            return None
        self._hold(digest, data)
        return data

    def _hold(self, digest: bytes, data: NDArray[np.uint8]) -> None:
        limit = self._settings.cpu_bytes_to_use
        before = self._held.pop(digest, None)
        self._num_bytes -= 0 if before is None else len(before)
        if len(data) > limit:
            return
        self._held[digest] = data
        self._num_bytes += len(data)
        while self._num_bytes > limit:
            _, dropped = self._held.popitem(last=False)
            self._num_bytes -= len(dropped)

    def _files_of(self, num_bytes: int) -> BlockFiles:
        files = self._files.get(num_bytes)
        if files is None:
            assert self._settings.path is not None
            limit = self._settings.max_path_bytes
            files = self._files[num_bytes] = self.files_class(Path(self._settings.path), "images", num_bytes, limit)
        return files

    def _maker(self, name: str) -> str:
        return f"weights {name.partition(' ')[0]}, {self._model}"

    def _digest(self, name: str) -> bytes:
        return blake2b(f"{self._model} {name}".encode(), digest_size=_DIGEST_BYTES).digest()


def store_class(config: ECTransferConfig) -> type[EmbeddingStore]:
    """Import and return the class that `ec_transfer_config` names.

    Raises:
        InvalidConfig: it can't be imported, or isn't an `EmbeddingStore`.
    """
    found = import_class("ec_connector", config.ec_connector, EC_CONNECTORS)
    if not (isinstance(found, type) and issubclass(found, EmbeddingStore)):
        raise InvalidConfig(
            f"ec_connector={config.ec_connector!r} isn't a subclass of raycore.kv_transfer.embeddings.EmbeddingStore"
        )
    return found
