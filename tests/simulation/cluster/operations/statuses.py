"""Looks at the engine from other processes of the cluster, as `raycore status` has them, and calls that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raycore.control.remote import RemoteEngine, ask_engines
from raycore.errors import ControlError
from raycore.llm import AsyncLLM
from raycore.system import asyncio
from simulation.cluster.circumstances.observers import PUBLISHED_S
from simulation.cluster.operations.contract import Capability, History, end_of, is_done
from simulation.cluster.records import Deed
from simulation.ray import api
from simulation.world.threads import world

_NAMESPACE = "raycore"
_LOOK_S = 0.01


class Statuses(Capability):
    """See the module. Only seeds with `circumstances.observers` have any."""

    kinds = ("read_status", "call_from_elsewhere")
    weight = 0

    async def perform(self, llm: AsyncLLM, deed: Deed) -> None:
        cluster = world().systems["ray"]
        nodes = [node for node in cluster.nodes if node.takes_actors and not node.is_lost]
        found: list[Any] = []

        def look() -> None:
            api.init(namespace=_NAMESPACE)
            if deed.operation.kind == "read_status":
                found.extend(ask_engines(None))
                return
            try:
                RemoteEngine(llm.config.engine_name or "").call("scale", data_parallel_size=0)
            except ControlError as error:
                found.append(str(error))

        process = cluster.drive("status", look, nodes[deed.operation.arguments["node"] % len(nodes)])
        while not process.has_ended:
            await asyncio.sleep(_LOOK_S)
        deed.result = found

    def problems(self, deed: Deed, history: History) -> Iterator[str]:
        if deed.operation.kind == "call_from_elsewhere":
            is_told = "data_parallel_size=0 isn't an integer from 1" in str(deed.result)
            if is_done(deed) and not (is_told or history.has_broken):
                yield f"the engine refuses the call, and its caller is told {deed.result}"
            return
        for each in deed.result if isinstance(deed.result, list) else ():
            if each.status is not None and each.status.failure is not None and not each.status.ranks:
                yield f"{each.name} has failed, and others are told of no rank"
        if not is_done(deed) or history.has_broken or deed.operation.at_s < PUBLISHED_S:
            return
        assert isinstance(deed.result, list)
        may_start = any(each.operation.kind == "scale" and each.began_s <= end_of(deed) for each in history.deeds)
        names = [each.name for each in deed.result]
        if names != [history.options["engine_name"]]:
            yield f"there are the engines {names}"
        for each in deed.result:
            if each.status is None:
                yield f"nothing is known of {each.name}: {each.problem}"
            elif not each.status.ranks or (
                any(rank.state == "starting" for rank in each.status.ranks) and not may_start
            ):
                yield f"the engine has been up for {deed.operation.at_s:g} s, and others are told that it is starting"
