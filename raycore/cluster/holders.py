"""Names the engines that hold a cluster's resources, from the names of their placement groups. No engine is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from placement.reserve import read_groups

_PREFIX = "raycore_"
_TITLE = ": "
"""Separates the title of an engine in its groups' names."""

_HOW_TO_END = (
    "An engine ends with its owner: a driver by SIGTERM or `ray job stop`, an actor when it is killed or nothing "
    "refers to it, a replica when its application is deleted or has fewer. `raycore status` shows the engines."
)


def prefix_of_groups(engine_id: str) -> str:
    """What the names of an engine's placement groups begin with."""
    return f"{_PREFIX}{engine_id}_"


def group_name(engine_id: str, dp_rank: int, title: str) -> str:
    """The name of a rank's placement group. `title`: names the engine and its owner; may be empty."""
    return f"{prefix_of_groups(engine_id)}dp{dp_rank}{_TITLE if title else ''}{title}"


def describe_holders(resources: Collection[str], own_engine_id: str) -> list[str]:
    """Which other engines hold some of these resources, where, and how to end them: lines. None if there are none."""
    held: dict[str, Counter[tuple[str, str]]] = {}
    """The amount of each resource on each node, by the engine's title."""
    for group in read_groups(_PREFIX):
        if group.name.startswith(prefix_of_groups(own_engine_id)):
            continue
        name, _, title = group.name.partition(_TITLE)
        engine = held.setdefault(title or f"engine {name.removeprefix(_PREFIX).partition('_')[0]}", Counter())
        for node_id, bundle in group.bundles:
            engine.update({(node_id, name): amount for name, amount in bundle.items() if name in resources})
    lines = [f"  {title}: {_describe(amounts)}" for title, amounts in sorted(held.items()) if amounts]
    return ["Other engines hold resources:", *lines, _HOW_TO_END] if lines else []


def _describe(amounts: Counter[tuple[str, str]]) -> str:
    nodes = dict.fromkeys(node_id for node_id, _ in sorted(amounts))
    return ", ".join(
        " ".join(f"{name} {amount:g}" for (where, name), amount in sorted(amounts.items()) if where == node_id)
        + f" on {node_id[:8]}"
        for node_id in nodes
    )
