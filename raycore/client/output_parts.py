"""Makes what adds to outputs from the engine's configuration, one line for each capability."""

from __future__ import annotations

from collections.abc import Iterator

from raycore.client.part import OutputPart
from raycore.config import EngineConfig
from raycore.parts.hidden_states.client import HiddenStates
from raycore.parts.routed_experts.client import ReturnedExperts
from raycore.parts.transfers.client import params as transfer_params


def make_output_parts(config: EngineConfig) -> Iterator[OutputPart]:
    """Yield what an engine's clients have."""
    yield HiddenStates()
    if config.routed_experts.enable_return_routed_experts:
        yield ReturnedExperts(config.model.spec)
    yield from transfer_params.output_parts(config)
