"""An actor that uses a part of a node, or takes the room of others."""

from __future__ import annotations

from raycore.ray_api import actor_class, endpoint


class Neighbour:
    """Does nothing."""

    @endpoint()
    def is_there(self) -> bool:
        return True


NEIGHBOUR = actor_class(Neighbour)
