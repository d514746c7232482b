"""The ranks' status, assembled from what the engine's program already knows. No rank is queried."""

from __future__ import annotations

import msgspec.structs

from raycore.activity import Activity
from raycore.client.client import LinkView
from raycore.client.group import ClientGroup
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.supervisor import Supervisor, WatchView
from raycore.messages import NO_LOAD
from raycore.status import UP_STATES, RankState, RankStatus


def rank_statuses(manager: CoreEngineActorManager, supervisor: Supervisor, clients: ClientGroup) -> list[RankStatus]:
    """The status of each rank, in rank order; empty after the engine was shut down."""
    links, watches, activity = clients.links(), supervisor.watches(), manager.desired.now.activity
    statuses: list[RankStatus] = []
    for dp_rank, rank in sorted(manager.ranks.items()):
        link, watch, info = links.get(dp_rank), watches.get(dp_rank), rank.info
        state = rank_state(link, watch, activity, is_up=info is not None, is_stale=rank.weights.is_stale)
        load = link.load if link is not None and state != "gone" else NO_LOAD
        process = info if state in UP_STATES else None
        decode_rate = process.step_bytes / load.decode_s if process is not None and load.decode_s else 0.0
        statuses.append(
            RankStatus(
                dp_rank,
                state,
                node_ids=list(dict.fromkeys(rank.nodes)) if state != "unplaced" else [],
                pid=process.pid if process is not None else None,
                gpu_ids=process.gpu_ids if process is not None else [],
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                kv_usage=round(load.kv_usage, 4),
                num_restarts=watch.num_restarts if watch is not None else 0,
                num_deferred=load.num_deferred,
                kv_fetches=msgspec.structs.asdict(load.kv_fetches),
                sleep_level=activity.sleep_level if state == "asleep" else 0,
                running_adapters=load.adapters.running,
                waiting_adapters=load.adapters.waiting,
                backends=process.backends if process is not None else (),
                parts_by_torch=process.parts_by_torch if process is not None else (),
                weights=process.weights if process is not None else (),
                shortage=watch.shortage if watch is not None and state == "unplaced" else "",
                decode_rate=decode_rate,
                # other programs may have kept the cores busy while the memory was measured
                memory_rate=max(process.memory_rate, decode_rate) if process is not None else 0.0,
            )
        )
    return statuses


def rank_state(
    link: LinkView | None, watch: WatchView | None, activity: Activity, *, is_up: bool, is_stale: bool = False
) -> RankState:
    """A rank's state.

    Args:
        link: the client's view of the rank; None while the rank isn't in service.
        watch: the supervisor's view of the rank; None while the rank isn't supervised.
        activity: what the engine does.
        is_up: whether the rank has started and reported its `EngineInfo`.
        is_stale: whether it has no weights to serve with.
    """
    if watch is not None and watch.has_given_up:  # clients keep their links to the ranks of an engine that has failed
        return "gone"
    if link is not None:
        if link.is_leaving:
            return "leaving"
        return "asleep" if activity.asleep else "paused" if activity.is_paused else "serving"
    if is_stale and is_up:
        return "stale"
    if watch is not None:
        return "unplaced" if watch.shortage else "restarting"
    return "leaving" if is_up else "starting"
