"""Logs: what they say is so, and an engine in which nothing has broken is shut down without a warning of anybody."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from simulation.cluster.accounts.account import Account, Run
from simulation.heard import Logged

_SLEEPS = frozenset({"sleep"})
_UPDATES = frozenset({"start_weight_update", "reload_weights"})


class Claim(NamedTuple):
    """What a warning or an error may say."""

    said: re.Pattern[str]
    is_so: Callable[[Run, Logged], bool]
    wanted: str
    """What is so otherwise."""


def _was_asked(run: Run, logged: Logged, kinds: frozenset[str], **arguments: object) -> bool:
    """Whether operators had begun such a call before."""
    return any(
        deed.operation.kind in kinds
        and deed.began_s <= logged.at_s
        and arguments.items() <= deed.operation.arguments.items()
        for deed in run.recorder.deeds
    )


def _has_broken(run: Run, logged: Logged) -> bool:
    return run.faults.first_s <= logged.at_s or _was_asked(run, logged, frozenset({"break_worker"}))


CLAIMS = (
    Claim(
        re.compile(r"^dp_rank \d+ \(.*\) died: |^dp_rank \d+ \(.*\) can't continue", re.MULTILINE),
        _has_broken,
        "nothing has broken",
    ),
    Claim(
        re.compile(r"are gone after sleep\(level=2\)"),
        lambda run, logged: _was_asked(run, logged, _SLEEPS, level=2),
        "no operator has called sleep(level=2)",
    ),
    Claim(
        re.compile(r"all ranks are restarted to become|moving experts failed"),
        lambda run, logged: _has_broken(run, logged) or _was_asked(run, logged, _SLEEPS | _UPDATES),
        "nothing has broken, and the engine has neither slept nor got other weights",
    ),
)


class Logs(Account):
    """What is logged as a warning or as an error, in any process."""

    def over(self) -> Iterator[str]:
        run = self.run
        for each in run.logged:
            for claim in CLAIMS:
                if claim.said.search(each.said) and not claim.is_so(run, each):
                    yield f"{each}, though {claim.wanted}"
        if run.shutdown_s and run.is_unbroken:
            yield from (f"nothing has broken, and {each}" for each in run.logged if each.at_s >= run.shutdown_s)
