"""When the scheduler's side of a connector is told what those of the workers tell at the start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from configs import make_config

from raycore.cache_layout import CacheGroup, CacheLayout, CacheLimits, KVCacheConfig
from raycore.parts.transfers.config.kv_transfer import KVTransferConfig
from raycore.parts.transfers.connectors.connector import KVConnector
from raycore.parts.transfers.engine import ConnectorCalls, make_connector
from raycore.worker.rank import Regrouping

CACHE = KVCacheConfig(9, CacheLayout((CacheGroup("full", ()),), CacheLimits(16, 64, 64)))
CONFIG = msgspec.structs.replace(make_config(), kv_transfer_config=KVTransferConfig(f"{__name__}.Noting"))


class Noting(KVConnector):
    """Notes what it is told."""

    told: ClassVar[list[dict[int, bytes]]] = []

    @classmethod
    def scheduler_side(cls, setup: Any) -> Any:
        return SimpleNamespace(set_xfer_handshake_metadata=cls.told.append, addresses=["here"])


class Workers:
    """They have no cache until they join others."""

    has_cache = False

    def collective_rpc(self, method: str, *args: Any) -> list[bytes]:
        assert method == "get_kv_connector_handshake_metadata"
        assert self.has_cache
        return [b"hello"]


@pytest.fixture
def workers() -> Workers:
    Noting.told.clear()
    return Workers()


def calls(workers: Any, *, is_new: bool) -> ConnectorCalls:
    connector = make_connector(CONFIG, CACHE, workers, 0, has_cache=not is_new)
    engine: Any = SimpleNamespace(config=CONFIG, executor=workers, scheduler=None)
    return ConnectorCalls(engine, connector, is_new=is_new)


def test_a_rank_with_a_cache_asks_its_workers_at_the_start_and_never_again(workers: Workers) -> None:
    workers.has_cache = True
    part = calls(workers, is_new=False)
    assert Noting.told == [{0: b"hello"}]
    part.regroup(Regrouping(1, 2, "", 1), stays=True)
    assert len(Noting.told) == 1


def test_a_rank_that_joins_others_asks_them_when_their_cache_exists(workers: Workers) -> None:
    part = calls(workers, is_new=True)
    part.regroup(Regrouping(2, 1, "", 1), stays=False)
    assert Noting.told == []
    workers.has_cache = True
    for generation in (2, 3):
        part.regroup(Regrouping(1, 2, "", generation), stays=True)
        assert Noting.told == [{0: b"hello"}]
