"""Requests whose outputs are made of a few tokens."""

from __future__ import annotations

from simulation.cluster.kinds.kind import VOCABULARY
from simulation.cluster.kinds.rules import Rule

KIND = Rule("allowed tokens", lambda draw, _: {"allowed_token_ids": [draw.randrange(VOCABULARY) for _ in range(4)]})
