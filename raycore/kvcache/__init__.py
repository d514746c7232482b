"""Bookkeeping of KV cache blocks: reference counts, cached prefixes, eviction. Knows neither requests nor tensors."""
