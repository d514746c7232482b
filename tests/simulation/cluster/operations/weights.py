"""Which weights the names in outputs stand for, as it follows from what operators have done.

A call that has changed weights, or may have, gives a name its content at a time. Names that operators give are unique,
so mostly a name has one content. It has several if weights were changed without another name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from raycore.config import EngineConfig
from raycore.messages import FIRST_WEIGHTS, EngineRequest
from simulation.cluster.operations.checkpoints import path_of
from simulation.cluster.operations.conditions import ASLEEP, updating
from simulation.cluster.operations.contract import NEVER_S, History, end_of, is_done, is_refused
from simulation.cluster.records import Deed, Record
from simulation.cluster.records import Sequence as Output
from simulation.worker import expected, model
from simulation.worker.model import Shape
from simulation.worker.numbers64 import Words
from simulation.worker.weights import checksum_of


@dataclass(frozen=True, eq=False)
class Setting:
    """That the weights may have got a name and content between two moments."""

    name: str
    contents: tuple[Words, ...]
    began_s: float
    ended_s: float
    is_sure: bool
    """Whether they have. Otherwise those of before may be there, too."""


@dataclass
class _Update:
    """What a trainer has brought."""

    base: str
    parts: dict[str, int] = field(default_factory=dict)


class WeightNames:
    """See the module."""

    def __init__(self, history: History, config: EngineConfig) -> None:
        self.history = history
        first = model.weights_of(config.model.model)
        self.settings = [Setting(FIRST_WEIGHTS.name, (first,), -NEVER_S, -NEVER_S, True)]
        self._stored = [self.settings[0]]
        """Settings of which one is the latest whose content is a checkpoint's."""
        self._update: _Update | None = None
        for deed in history.deeds:
            method = getattr(self, f"_after_{deed.operation.kind}", None)
            if method is not None and not is_refused(deed):
                method(deed)

    def contents(self, name: str) -> tuple[Words, ...]:
        """All that the weights with this name may have been."""
        found = [content for each in self.settings if each.name == name for content in each.contents]
        return tuple({content.tobytes(): content for content in found}.values())

    def all(self) -> tuple[Words, ...]:
        """All that weights may have been."""
        found = {content.tobytes(): content for setting in self.settings for content in self.contents(setting.name)}
        return tuple(found.values())

    def during(self, record: Record) -> tuple[Words, ...]:
        """All that weights may have been while a request ran."""
        assert record.submitted_s is not None, "it ran"
        end_s = NEVER_S if record.ended_s is None else record.ended_s
        found: dict[bytes, Words] = {}
        for each in self.settings:
            if each.began_s <= end_s and not self._is_followed(each, record.submitted_s):
                found |= {content.tobytes(): content for content in self.contents(each.name)}
        return tuple(found.values())

    def is_over(self, name: str, at_s: float) -> bool:
        """Whether weights were surely called something else from this time on, or from before."""
        return not any(each.name == name and not self._is_followed(each, at_s) for each in self.settings)

    def _is_followed(self, setting: Setting, at_s: float) -> bool:
        return any(
            each.is_sure and each.name != setting.name and each.began_s >= setting.ended_s and each.ended_s <= at_s
            for each in self.settings
        )

    def may_follow(self, name: str, later: str) -> bool:
        """Whether weights with one name may have come after those with another one."""
        return any(
            first.began_s <= second.ended_s
            for first in self.settings
            for second in self.settings
            if first.name == name and second.name == later
        )

    # ---- what calls do

    def _add(self, deed: Deed, name: str, contents: Sequence[Words], *, is_sure: bool | None = None) -> Setting:
        setting = Setting(
            name, tuple(contents), deed.began_s, end_of(deed), is_done(deed) if is_sure is None else is_sure
        )
        self.settings.append(setting)
        return setting

    def _after_start_weight_update(self, deed: Deed) -> None:
        self._update = _Update(deed.version) if is_done(deed) else None

    def _after_update_weights(self, deed: Deed) -> None:
        if not is_done(deed):
            self._update = None
        elif self._update is not None:
            arguments = deed.operation.arguments
            new = model.weights_of(arguments["checkpoint"])
            self._update.parts |= {name: int(new[model.UNITS.index(name)]) for name in arguments["names"]}

    def _after_cancel_weight_update(self, deed: Deed) -> None:
        if is_done(deed):
            self._update = None

    def _after_finish_weight_update(self, deed: Deed) -> None:
        update, self._update = self._update, None
        if update is None or not is_done(deed):
            return
        contents = [_with_parts(content, update.parts) for content in self.contents(update.base)]
        name = deed.operation.arguments.get("weight_version", deed.version)
        self._add(deed, name, contents)

    def _after_reload_weights(self, deed: Deed) -> None:
        number = deed.operation.arguments.get("checkpoint")
        if number is None:
            contents = [content for each in self._stored for content in each.contents]
        else:
            contents = [model.weights_of(path_of(number))]
        name = deed.operation.arguments.get("weight_version", deed.version)
        if is_done(deed):
            self._store(deed, self._add(deed, name, contents), is_sure=True)

    def _after_update_weight_version(self, deed: Deed) -> None:
        now = [each for each in self.settings if not self._is_followed(each, deed.began_s)]
        contents = {content.tobytes(): content for each in now for content in self.contents(each.name)}
        setting = self._add(deed, deed.operation.arguments["new_version"], list(contents.values()))
        if any(each in self._stored for each in now):
            self._store(deed, setting, is_sure=all(each in self._stored for each in now))

    def _store(self, deed: Deed, setting: Setting, *, is_sure: bool) -> None:
        """Weights have come from files, or have got another name, if it is so `is_sure`ly."""
        is_sure &= is_done(deed) and not any(
            each is not deed
            and each.operation.kind in _CHANGES
            and each.began_s <= end_of(deed)
            and end_of(each) >= deed.began_s
            for each in self.history.deeds
        )
        self._stored = [setting] if is_sure else [*self._stored, setting]

    def _after_load_weights(self, deed: Deed) -> None:
        """It reaches the ranks that are there, one after the other, and gives no name."""
        arguments = deed.operation.arguments
        for name in {each.name: None for each in self.settings if not self._is_followed(each, deed.began_s)}:
            contents = [_with_parts(each, {arguments["name"]: arguments["number"]}) for each in self.contents(name)]
            self._add(deed, name, contents, is_sure=False)
        if self._update is not None:
            self._update.parts.pop(arguments["name"], None)

    def _after_wake_up(self, deed: Deed) -> None:
        """After a sleep that drops weights, they may be those that came from a checkpoint last."""
        if any(each.operation.arguments.get("level") == 2 for each in self.history.deeds):
            for each in list(self._stored):
                self._add(deed, each.name, (), is_sure=False)


def _with_parts(content: Words, parts: dict[str, int]) -> Words:
    new = content.copy()
    for name, number in parts.items():
        new[model.UNITS.index(name)] = np.uint64(number)
    return new


def problems(record: Record, output: Output, request: EngineRequest, shape: Shape, names: WeightNames) -> Iterator[str]:
    """What is wrong with the tokens of an output, and with what it says of its weights."""
    tokens, spans = output.tokens, output.versions
    if spans and [start for _, start, _ in spans] + [len(tokens)] != [0] + [end for _, _, end in spans]:
        yield f"the spans of its weights are {spans} of {len(tokens)} tokens"
        return
    # an output that hasn't finished doesn't say which weights it comes from
    for name, start, end in spans or [(None, 0, len(tokens))]:
        contents = names.all() if name is None else names.contents(name)
        if not contents:
            yield f"weights {name!r} were never there"
            return
        whole = [*request.prompt_token_ids, *tokens]
        rights = [expected.next_tokens(shape, request, whole, each, start, end) for each in contents]
        for index in range(start, end):
            if tokens[index] not in [each[index - start] for each in rights]:
                yield f"token {index} of {tokens} isn't what follows with weights {name!r}, spans {spans}"
                return
    assert record.submitted_s is not None, "it has tokens"
    for name, _, _ in spans:
        if names.is_over(name, record.submitted_s):
            yield f"was computed with weights {name!r}, which were replaced before it was submitted"
    for (name, _, _), (later, _, _) in pairwise(spans):
        if not names.may_follow(name, later):
            yield f"weights {later!r} were replaced before {name!r} came, and were used afterwards"


_CHANGES = frozenset(
    {
        *("start_weight_update", "update_weights", "finish_weight_update", "cancel_weight_update", "load_weights"),
        *("reload_weights", "update_weight_version", "sleep", "wake_up"),
    }
)


def checksum_problems(history: History, names: WeightNames) -> Iterator[str]:
    """What is wrong with the checksums of weights that workers have told while nothing changed them."""
    updating_now, asleep = updating(history), ASLEEP["weights"]
    has_loads = any(each.operation.kind == "load_weights" for each in history.deeds)
    for deed in history.deeds:
        if deed.operation.kind != "weights_checksum" or not isinstance(deed.result, list):
            continue
        overlaps = any(
            each.operation.kind in _CHANGES and each.began_s <= end_of(deed) and end_of(each) >= deed.began_s
            for each in history.deeds
        )
        if overlaps or updating_now.may_hold(history, deed) or asleep.may_hold(history, deed):
            continue
        found = set(deed.result)
        if not has_loads and len(found) > 1:
            yield f"at {deed.began_s:.4f} s, workers have different weights: {deed.result}"
        if found - {checksum_of(content) for content in names.contents(deed.version)}:
            yield f"at {deed.began_s:.4f} s, workers have weights that aren't {deed.version!r}: {deed.result}"
