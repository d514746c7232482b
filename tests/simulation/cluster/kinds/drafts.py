"""Requests of engines that draft tokens."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from simulation.cluster.anywhere import MODEL
from simulation.cluster.kinds.kind import Kind
from simulation.scenario import Request


class _Drafts(Kind):
    name = "drafts"
    engine_share = 0.3

    def options(self, draw: random.Random, options: Mapping[str, Any]) -> dict[str, Any] | None:
        if options.get("runner") == "pooling":
            return None
        has_stages, has_connector = options.get("pipeline_parallel_size", 1) > 1, "kv_transfer_config" in options
        methods = ["ngram", "suffix"]
        if not (options.get("enable_prompt_embeds") or has_stages or has_connector):
            methods.append("draft_model")
        config: dict[str, Any] = {"method": draw.choice(methods), "num_speculative_tokens": draw.choice([1, 2, 4])}
        if config["method"] == "draft_model":
            config["model"] = MODEL
        if config["method"] == "ngram":
            config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
        if draw.random() < 0.7:  # otherwise as many as pay, which are none with a device as fast as the simulated one
            config["num_speculative_tokens_per_batch_size"] = [[1, 64, config["num_speculative_tokens"]]]
        return {"speculative_config": config}

    def is_of(self, request: Request, options: Mapping[str, Any]) -> bool:
        return "speculative_config" in options


KIND = _Drafts()
