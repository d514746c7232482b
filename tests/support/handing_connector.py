"""A KV connector as a user writes one that hands over prompts from one engine to another, after vLLM's."""

from __future__ import annotations

from layer_connector import LayerConnector


class HandingConnector(LayerConnector):
    """Saves what it computes, layer by layer, and loads only what a request names. Both engines are in one process."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        told = request.kv_transfer_params or {}
        if not told.get("do_remote_prefill"):
            return 0, False
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return min(found, told["remote_num_tokens"] - num_computed_tokens), is_async

    def request_finished(self, request, block_ids):
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        size = self.setup.cache.layout.limits.block_size
        return False, {"do_remote_prefill": True, "remote_num_tokens": request.num_computed_tokens // size * size}
