"""Connectors whose transfers are corrupted, late or lost at random. Engines' processes import them by their paths."""

from __future__ import annotations

import atexit
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from common import let_processes_import
from numpy.typing import NDArray

from raycore import AsyncLLM
from raycore.parts.transfers.connectors.peers.connector import DisaggregationConnector, PeersConnector
from raycore.parts.transfers.connectors.peers.server import BlockServer
from raycore.parts.transfers.connectors.peers.wire import Broken
from raycore.parts.transfers.connectors.peers.worker_side import PeersWorker
from raycore.parts.transfers.worker import WorkerTransfers

FETCH_TIMEOUT_S = 0.5
PREFIXES = 16
"""Number of long beginnings that prompts share, so that there is something to transfer."""
NUM_BLOCKS = 400
"""Few enough that the cache can't keep them all."""


class FaultyServer(BlockServer):
    """Of a hundred blocks that it sends, one is corrupted, one swapped, and one late, and one breaks the connection."""

    def copy(self, digest: bytes, out: NDArray[np.uint8]) -> int:
        """Copy a block, sometimes badly."""
        chance = random.random()
        if chance < 0.01:
            time.sleep(2 * FETCH_TIMEOUT_S)
        elif chance < 0.02:
            raise Broken("a fault was injected")
        elif chance < 0.03:
            return super().copy(digest, np.empty_like(out))
        found = super().copy(digest, out)
        if 0.03 < chance < 0.04:
            out[random.randrange(len(out))] ^= 1 << random.randrange(8)
        return found


class FaultyWorker(PeersWorker):
    """Serves faulty blocks."""

    server_class = FaultyServer


class FaultyPeers(PeersConnector):
    """`PeersConnector` with faults."""

    worker_class = FaultyWorker


class FaultyDisaggregation(DisaggregationConnector):
    """`DisaggregationConnector` with faults."""

    worker_class = FaultyWorker


_READING = {"min_fetch_tokens": 16, "compare_costs": False, "fetch_timeout_s": FETCH_TIMEOUT_S}
CONNECTORS: dict[str, dict[str, Any]] = {
    "peers": {"kv_connector": f"{__name__}.FaultyPeers", "kv_connector_extra_config": _READING},
    "disaggregation": {
        "kv_connector": f"{__name__}.FaultyDisaggregation",
        "kv_connector_extra_config": {**_READING, "min_prefill_tokens": 64},
    },
    "offload": {
        "kv_connector": "chaos.faulty_connectors.FaultyOffloadConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 4 << 20, "disk_bytes": 256 << 20, "always_load": True},
    },
}
"""`kv_transfer_config`, by the names that benchmarks take."""


def options_of(name: str) -> dict[str, Any]:
    """An engine's options with this connector, with which its processes find it."""
    let_processes_import(Path(__file__).parents[1])
    config = CONNECTORS[name]
    if name == "offload":
        settings = config["kv_connector_extra_config"]
        config = {**config, "kv_connector_extra_config": {**settings, "path": _temporary_directory()}}
    return {"kv_transfer_config": config, "num_gpu_blocks_override": NUM_BLOCKS, "block_size": 16}


def embedding_options() -> dict[str, Any]:
    """An engine's options with a faulty store of embeddings, and an encoder cache that is too small for all images."""
    let_processes_import(Path(__file__).parents[1])
    settings = {"cpu_bytes_to_use": 0, "path": _temporary_directory()}
    connector = "chaos.faulty_connectors.FaultyEmbeddings"
    return {
        "ec_transfer_config": {"ec_connector": connector, "ec_connector_extra_config": settings},
        "max_num_batched_tokens": 128,
    }


def _temporary_directory() -> str:
    path = tempfile.mkdtemp(prefix="chaos-kv-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


async def transfers_of(llm: AsyncLLM) -> Counter[str]:
    """What the workers that live have read from others, or of embeddings."""
    reads_embeddings = llm.config.ec_transfer_config is not None

    # a nested function, which is pickled by value
    def counts(worker: Any) -> dict[str, int]:
        if reads_embeddings:
            from chaos.faulty_connectors import COUNTS

            return dict(COUNTS)
        return dict(worker._parts[WorkerTransfers].connector.counts)

    return sum((Counter(each) for each in await llm.collective_rpc(counts)), Counter[str]())
