"""A KV connector as a user writes one that reads the parameters of requests, and answers with others."""

from __future__ import annotations

import os
from typing import Any

from layer_connector import LayerConnector

from raycore.config import EngineConfig


class AnsweringConnector(LayerConnector):
    """Says with each sequence what its request has told, and where it ended. Refuses the key `bad`."""

    @classmethod
    def check_params(cls, params: dict[str, Any], config: EngineConfig) -> None:
        if "bad" in params:
            raise ValueError("bad isn't known here")

    def request_finished(self, request, block_ids):
        told = {"heard": request.kv_transfer_params, "pid": os.getpid(), "last_token": int(request.tokens[-1])}
        return False, told
