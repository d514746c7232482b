"""Requests that end at certain tokens. They come soon."""

from __future__ import annotations

from simulation.cluster.kinds.rules import Rule, many_tokens

KIND = Rule("stop tokens", lambda draw, _: {"stop_token_ids": many_tokens(draw), "ignore_eos": draw.random() < 0.5})
