"""Requests whose callers have one rank compute the prompt, and tell another one where it is, as a proxy does."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from raycore.errors import InvalidRequest
from raycore.llm import AsyncLLM
from raycore.sampling_params import SamplingParams
from simulation.cluster.kinds.kind import Asked, Kind
from simulation.cluster.records import Record
from simulation.scenario import Request

if TYPE_CHECKING:
    from simulation.cluster.kinds.kind import Perform

_DECODE = {"do_remote_decode": True}
_FORGED = {"do_remote_prefill": True, "remote_ticket": "forged"}
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "forged": (_FORGED, "remote_ticket is none"),
    "not given": (_DECODE, "computes no prompts for others"),
    "not taken": (_FORGED, "reads from no others"),
}
"""By name: what is asked, and what the refusal says."""
_WAYS = {
    "kv_both": ["read", "read", "read", "unread", "forged"],
    "kv_producer": ["unread", "unread", "not taken"],
    "kv_consumer": ["forged", "not given"],
}
"""By an engine's role."""


def _asking(params: dict[str, Any], told: dict[str, Any] | None) -> dict[str, Any]:
    return params if told is None else params | {"extra_args": {"kv_transfer_params": told}}


async def _hand_over(
    is_read: bool, perform: Perform, llm: AsyncLLM, asked: Asked, record: Record
) -> AsyncIterator[Any]:
    own = SamplingParams(**_asking(asked.params | {"max_tokens": 1, "min_tokens": 0, "n": 1}, _DECODE))
    name = record.request_id and f"{record.request_id} prompt"
    told = None
    async for output in llm.generate(asked.prompt, own, name, record.request.priority, **asked.arguments):
        told = output.kv_transfer_params
    following = dataclasses.replace(asked, params=_asking(asked.params, told if is_read else None))
    async for output in perform(llm, following, record):
        yield output


class _Ticket(Kind):
    name = "ticket"
    engine_share = 1.0
    request_share = 0.6
    excludes = (
        "added", "cache salt", "ended between pieces", "ended by operators", "odd values", "pieces", "pooled",
        "refused", "slow pieces",
    )  # fmt: skip

    def options(self, draw: random.Random, options: Mapping[str, Any]) -> dict[str, Any] | None:
        transfer = options.get("kv_transfer_config") or {}
        return {} if "secret_file" in transfer.get("kv_connector_extra_config", {}) else None

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> str:
        return draw.choice(_WAYS[options["kv_transfer_config"]["kv_role"]])

    def apply(self, value: str, request: Request, asked: Asked) -> None:
        if value in _REFUSED:
            told, said = _REFUSED[value]
            asked.params, asked.error = _asking(asked.params, told), (InvalidRequest, said)
        else:
            asked.perform = partial(_hand_over, value == "read", asked.perform)


KIND = _Ticket()
