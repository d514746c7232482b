"""The options of what follows the loss of a rank."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from raycore.options.declared import option
from raycore.options.numbers import Seconds, Timeout


class RecoveryConfig(msgspec.Struct, frozen=True):
    """What happens when ranks fail, stall or are removed."""

    max_request_replays: Annotated[
        int,
        Meta(ge=0),
        option(
            "Number of failures of its rank that a request survives: it continues on another rank, or on the failed "
            "rank's replacement. The next failure fails the request."
        ),
    ] = 2
    step_timeout_s: Annotated[
        Timeout,
        option(
            "Maximum duration of a step in seconds. A rank with requests that takes longer, or does not respond for "
            "that long, is killed and replaced."
        ),
    ] = 60.0
    drain_timeout_s: Annotated[
        Seconds,
        option(
            "Seconds that a rank has to finish its requests before it is removed by scale() or leaves a node that Ray "
            "drains. Unfinished requests move to other ranks.",
            flags=("--rank-drain-timeout-s",),
        ),
    ] = 30.0
    max_rank_restarts: Annotated[
        int,
        Meta(ge=0),
        option(
            "Maximum number of restarts of a rank within restart_window_s. Attempts for one loss all count, however "
            "long they take. A rank that would need more is given up for good. Once all ranks are given up, the engine "
            "fails."
        ),
    ] = 5
    restart_window_s: Annotated[Timeout, option("Length in seconds of the sliding period for max_rank_restarts.")] = (
        300.0
    )
    restart_backoff_s: Annotated[
        Seconds,
        option(
            "Delay in seconds before a rank is restarted for the second time within crash_loop_s. It doubles with each "
            "further restart within that period. The first restart is immediate."
        ),
    ] = 0.5
    crash_loop_s: Annotated[Seconds, option("Length in seconds of the sliding period for restart_backoff_s.")] = 30.0
    max_restart_backoff_s: Annotated[Seconds, option("Maximum delay in seconds before a restart.")] = 30.0
    weight_update_timeout_s: Annotated[
        Timeout,
        option(
            "Seconds that a call of a weight update may take, and after which the update is given up if its next call "
            "hasn't come."
        ),
    ] = 300.0
    standby_delay_s: Annotated[
        Seconds | None,
        option(
            "Seconds after the ranks are ready at which standbys start: on each node with ranks, the idle processes of "
            "one rank. They use memory, and make replacing a rank faster. None (for the flag: none): no standbys. "
            "There are never any with expert parallelism over several ranks."
        ),
    ] = 8.0
    placement_timeout_s: Annotated[
        Timeout,
        option(
            "Seconds to wait for resources that others in the cluster use, when an engine starts, or when no rank "
            "serves and one has lost its node: such a wait counts as a restart. While others serve, a rank that has "
            "lost its node waits for as long as it takes. scale() waits 10 seconds whatever this is. See also "
            "wait_for_nodes_s."
        ),
    ] = 60.0
