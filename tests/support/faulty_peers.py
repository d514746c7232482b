"""Connectors whose transfers fail: engines' processes import them by their paths."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from raycore.parts.transfers.connectors.peers.connector import PeersConnector
from raycore.parts.transfers.connectors.peers.server import BlockServer
from raycore.parts.transfers.connectors.peers.worker_side import PeersWorker


class FaultyServer(BlockServer):
    """Of the blocks that it sends, the 5th is corrupted, the 13th is late, and the 21st is another one."""

    num_sent = 0

    def copy(self, digest: bytes, out: NDArray[np.uint8]) -> int:
        """Copy a block, badly if it is its turn."""
        self.num_sent += 1
        if self.num_sent == 13:
            time.sleep(3)
        if self.num_sent == 21:
            return super().copy(digest, np.empty_like(out))
        found = super().copy(digest, out)
        if self.num_sent == 5:
            out[len(out) // 2] ^= 1
        return found


class FaultyWorker(PeersWorker):
    """Serves faulty blocks."""

    server_class = FaultyServer


class FaultyPeersConnector(PeersConnector):
    """Its workers serve faulty blocks."""

    worker_class = FaultyWorker
