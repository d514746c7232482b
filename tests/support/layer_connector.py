"""A KV connector as a user writes one: both sides in one class, which saves and loads layer by layer."""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from raycore.messages import StepPlan
from raycore.parts.transfers.connectors.connector import ConnectorSetup, KVConnectorBase, KVConnectorRole
from raycore.parts.transfers.connectors.worker_side.caches import KVCaches


class Told(msgspec.Struct):
    """What the scheduler's side tells the worker's."""

    saves: list[tuple[bytes, int]] = []
    loads: list[tuple[bytes, int]] = []


class LayerConnector(KVConnectorBase):
    """Keeps all blocks in a dict of the process, by digest and layer."""

    has_layer_hooks = True
    kept: ClassVar[dict[bytes, dict[int, np.ndarray]]] = {}
    told_at_start: ClassVar[list[dict[int, bytes]]] = []

    def __init__(self, setup: ConnectorSetup, role: KVConnectorRole) -> None:
        super().__init__(setup, role)
        self.told = Told()
        self.num_tokens = 0
        self.greeting = setup.extra["greeting"]

    # ---- the scheduler's side

    def set_xfer_handshake_metadata(self, metadata):
        self.told_at_start.append(metadata)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        first = num_computed_tokens // self.setup.cache.layout.limits.block_size
        found = 0
        for digest in request.digests[first:]:
            if digest not in self.kept:
                break
            found += 1
        self.first = first
        return found * self.setup.cache.layout.limits.block_size, False

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        end = self.first + num_external_tokens // self.setup.cache.layout.limits.block_size
        self.told.loads += zip(request.digests[self.first : end], block_ids[self.first : end], strict=True)

    def request_finished(self, request, block_ids):
        return False, {"request_id": request.request_id, "params": request.kv_transfer_params}

    def blocks_stored(self, request, digests, block_ids, first):
        self.told.saves += zip(digests, block_ids, strict=True)

    def build_connector_meta(self, plan: StepPlan):
        told, self.told = self.told, Told()
        return msgspec.msgpack.encode(told)

    def has_pending_push_work(self):
        return bool(self.told.saves)

    # ---- the worker's side

    def register_kv_caches(self, caches: KVCaches) -> None:
        self.caches = caches

    def get_handshake_metadata(self):
        return self.greeting.encode()

    def start_load_kv(self, plan: StepPlan) -> None:
        self.now = Told() if self.metadata is None else msgspec.msgpack.decode(self.metadata, type=Told)
        for digest, block in self.now.saves:
            self.kept[digest] = {layer: page[block].numpy().copy() for layer, page in enumerate(self.caches.pages)}
        self.loaded = set()

    def wait_for_layer_load(self, layer: int) -> None:
        assert layer not in self.loaded
        self.loaded.add(layer)
        beside = self.caches.beside.get(layer)
        for digest, block in self.now.loads:
            for page in (layer,) if beside is None else (layer, beside):
                self.caches.pages[page].numpy()[block] = self.kept[digest][page]

    def save_kv_layer(self, layer: int) -> None:
        assert layer in self.loaded
