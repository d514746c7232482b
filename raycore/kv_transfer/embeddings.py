"""What a store of embeddings of a user subclasses: see `raycore.parts.transfers`."""

from __future__ import annotations

__all__ = ["EmbeddingStore"]

from raycore.parts.transfers.connectors.embeddings import EmbeddingStore
