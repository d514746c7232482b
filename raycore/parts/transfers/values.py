"""The names under which requests and outputs have what callers and KV connectors tell each other."""

from __future__ import annotations

PARAMS = "kv_transfer_params"
"""In `extra_args` of a request's `SamplingParams`, in its outputs, and of the report that brings it there. The report's
data is a dict in msgpack."""
