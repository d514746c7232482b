"""Where requests go: to a rank that has the beginning of their prompts, if all ranks are idle and one has it.

A prompt's beginning is known by its tokens, embeddings, salt and adapter. Ranks keep what they were sent, as long as
they have room for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from raycore.engine.core import EngineCore
from raycore.messages import EngineRequest
from simulation.cluster.accounts.account import Account, Run
from simulation.cluster.records import Record
from simulation.world import kernel

_CHUNK = 64
"""Tokens of a prompt that clients take for one piece."""
_IDLE_S = 1.5
"""Virtual seconds within which all ranks have said that they are idle."""
_ON_ITS_WAY_S = 0.5


class _Sent(NamedTuple):
    """A sequence that a rank gets."""

    at_s: float
    rank: kernel.Process
    request_id: str
    key: list[Any]


class Routes(Account):
    """What the ranks of an engine get."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        global _account
        is_plain = "kv_transfer_config" not in run.scenario.options and not run.scenario.num_api_servers
        _account = self if is_plain else None
        self._sent: list[_Sent] = []

    def note(self, request: EngineRequest) -> None:
        """A rank gets a request. On its loop's thread."""
        world = self.run.cluster.world
        assert world.current is not None
        self._sent.append(_Sent(world.now_s, world.current.process, request.request_id, _key(request)))

    def over(self) -> Iterator[str]:
        run = self.run
        until_s = min([run.faults.first_s, *(deed.began_s for deed in run.recorder.deeds)])
        records = {record.request_id: record for record in run.recorder.records}
        for index, sent in enumerate(self._sent):
            record = records.get(sent.request_id)
            before = self._sent[:index]
            if record is None or sent.at_s > until_s or any(each.request_id == sent.request_id for each in before):
                continue
            if "rank" in record.request.wants or not self._was_idle(record, sent.at_s):
                continue
            known = {each.rank: 0 for each in before}
            for each in before:
                known[each.rank] = max(known[each.rank], _num_common(each.key, sent.key))
            most, own = max(known.values(), default=0), known.get(sent.rank, 0)
            if most - own >= _CHUNK:
                yield f"{record.name} was sent to {sent.rank}, which has {own} tokens of its prompt, and another {most}"

    def _was_idle(self, record: Record, at_s: float) -> bool:
        """Whether no other request was there when this one came, and for a while before."""
        came_s = record.submitted_s
        if came_s is None or at_s > came_s + _ON_ITS_WAY_S:
            return False
        return all(
            each is record
            or each.submitted_s is None
            or each.submitted_s > at_s
            or (each.ended_s is not None and each.ended_s < came_s - _IDLE_S and not each.is_aborted)
            for each in self.run.recorder.records
        )


def _key(request: EngineRequest) -> list[Any]:
    """What a prompt's beginning is known by, token by token."""
    key: list[Any] = list(request.prompt_token_ids)
    for feature in request.features:
        for offset in range(feature.num_tokens):
            key[feature.position + offset] = (feature.identifier, offset)
    root = request.cache_salt, None if request.lora is None else request.lora.lora_path
    return [root, *key]


def _num_common(one: list[Any], other: list[Any]) -> int:
    """How many tokens two prompts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    end = next((index for index, (own, its) in pairs if own != its), min(len(one), len(other)))
    return max(0, end - 1)


_account: Routes | None = None
"""That of the present run."""
_original = EngineCore.submit


def _submit(self: EngineCore, request: EngineRequest, *args: Any) -> Any:
    if _account is not None:
        _account.note(request)
    return _original(self, request, *args)


EngineCore.submit = _submit
