"""What a KV connector of a user implements: see `raycore.parts.transfers`."""

from __future__ import annotations

__all__ = [
    "UNSPECIFIED",
    "ConnectorSetup",
    "KVConnector",
    "KVConnectorBase",
    "KVConnectorRole",
    "SchedulerConnector",
    "TransferRequest",
    "WorkerConnector",
]

from raycore.parts.transfers.connectors.connector import (
    UNSPECIFIED,
    ConnectorSetup,
    KVConnector,
    KVConnectorBase,
    KVConnectorRole,
    SchedulerConnector,
    TransferRequest,
    WorkerConnector,
)
