"""KV and encoder-cache connectors whose transfers are late, lost or corrupted. Ranks import them by their paths."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence

from raycore.options.declared import settings_of
from raycore.parts.transfers.connectors.connector import ConnectorSetup, WorkerConnector
from raycore.parts.transfers.connectors.embeddings import EmbeddingStore
from raycore.parts.transfers.connectors.offload.connector import OffloadConnector
from raycore.parts.transfers.connectors.offload.files import BlockFiles
from raycore.parts.transfers.connectors.offload.settings import OffloadSettings
from raycore.parts.transfers.connectors.offload.worker import OffloadWorker

KINDS = ("right", "late", "lost", "corrupted")
_CHANCES = (0.7, 0.1, 0.1, 0.1)
_LATE_S = 0.5
COUNTS: Counter[str] = Counter()
"""How many reads of files were of each kind in this process."""


class FaultyFiles(BlockFiles):
    """Files whose reads are late, find nothing, or find a changed byte."""

    def read(self, digest: bytes, pages: Sequence[memoryview]) -> bool:
        """Read a block as `BlockFiles` does, or with a fault."""
        path = self.path(digest)
        if not path.exists():
            return False
        (kind,) = random.choices(KINDS, _CHANCES)
        COUNTS[kind] += 1
        if kind == "late":
            time.sleep(_LATE_S)
        elif kind == "lost":
            path.unlink(missing_ok=True)
        elif kind == "corrupted":
            with path.open("r+b") as file:
                file.seek(random.randrange(path.stat().st_size))
                file.write(random.randbytes(1))
        return super().read(digest, pages)


class FaultyOffloadWorker(OffloadWorker):
    """A worker's side with such files."""

    files_class = FaultyFiles
    counts = COUNTS


class FaultyOffloadConnector(OffloadConnector):
    """The offload connector with such files."""

    @classmethod
    def worker_side(cls, setup: ConnectorSetup) -> WorkerConnector:
        return FaultyOffloadWorker(setup, settings_of("kv_connector_extra_config", setup.extra, OffloadSettings))


class FaultyEmbeddings(EmbeddingStore):
    """The store of embeddings with such files."""

    files_class = FaultyFiles
