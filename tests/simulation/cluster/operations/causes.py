"""What errors of operators' calls name as their cause: that it was so, and that it explains the failure.

That something has broken excuses a call only if the call says nothing of why it has failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from simulation.cluster.operations.contract import History, end_of
from simulation.cluster.records import Deed

_TIMEOUT_S = 300.0
"""The product's default of `weight_update_timeout_s`."""
_ABOUT_S = 0.1
"""By so much, a call that waits may end earlier by the driver's clock than by the one that it looks at."""


class Cause(NamedTuple):
    """What an error may say."""

    said: re.Pattern[str]
    explains: Callable[[Deed, History, re.Match[str]], bool]
    wanted: str
    """What is so if it doesn't explain the failure."""


def _is_in_the_middle_or_has_waited(deed: Deed, history: History, _: re.Match[str]) -> bool:
    return deed.operation.kind in ("update_weights", "finish_weight_update") or _has_waited(deed, history, _)


def _has_waited(deed: Deed, history: History, _: re.Match[str]) -> bool:
    return end_of(deed) - deed.began_s >= history.options.get("weight_update_timeout_s", _TIMEOUT_S) - _ABOUT_S


def _was_broken(deed: Deed, history: History, said: re.Match[str]) -> bool:
    return any(
        each.operation.kind == "break_worker"
        and each.operation.arguments["dp_rank"] == int(said["rank"])
        and each.began_s <= end_of(deed)
        for each in history.deeds
    )


CAUSES = (
    Cause(
        re.compile(r"all ranks were lost, so the update"),
        _is_in_the_middle_or_has_waited,
        "a call that begins an update waits for ranks that are being replaced until weight_update_timeout_s is over",
    ),
    Cause(
        re.compile(r"(hasn't|haven't) ended \w+\(\) within weight_update_timeout_s"),
        _has_waited,
        "it hasn't waited for weight_update_timeout_s",
    ),
    Cause(
        re.compile(r"dp_rank (?P<rank>\d+)\b.*the weights can't be read any further", re.DOTALL),
        _was_broken,
        "no operator has broken a worker of this rank",
    ),
)


def unexplained(deed: Deed, error: BaseException, history: History) -> str | None:
    """What speaks against the cause that an error names. None: nothing, or it names none."""
    for cause in CAUSES:
        said = cause.said.search(str(error))
        if said is not None and not cause.explains(deed, history, said):
            return cause.wanted
    return None
