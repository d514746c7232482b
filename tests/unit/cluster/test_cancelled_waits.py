"""Waits for bundles that the caller brought end when nobody wants them any more."""

from __future__ import annotations

import pytest
from configs import make_config
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup

from placement import reserve
from placement.plan import EngineShape
from raycore.cluster import reservations as reservations_module
from raycore.cluster.clock import Clock
from raycore.cluster.given import GivenPlaces
from raycore.cluster.reservations import Reservations
from raycore.errors import InitializationError

SHAPE = EngineShape(num_ranks=1, world_size=1)


@pytest.fixture
def reservations() -> Reservations:
    group = PlacementGroup(PlacementGroupID.from_random(), bundle_cache=[dict(bundle) for bundle in SHAPE.bundles])
    reservations = Reservations(make_config(), "engine", Clock())
    reservations.open(SHAPE, "node", is_ray_ours=False, given=GivenPlaces([group]))
    return reservations


@pytest.mark.parametrize("is_created", [False, True])
@pytest.mark.parametrize("is_shut_down", [False, True])
def test_a_cancelled_start_stops_waiting_for_the_callers_bundles(reservations, monkeypatch, is_created, is_shut_down):
    """Neither for a group to be created nor for bundles that others use."""
    monkeypatch.setattr(reserve, "_state", lambda group: "CREATED" if is_created else "PENDING")
    monkeypatch.setattr(reserve, "free_in_group", lambda group_id: {})
    calls = []

    def is_wanted() -> bool:
        calls.append(None)
        if is_shut_down:
            reservations.cancel()
        return is_shut_down

    with pytest.raises(InitializationError, match="the engine was shut down"):
        reservations.for_new_engine(is_wanted)
    assert len(calls) == 1


def test_added_ranks_of_an_engine_that_is_shut_down_do_not_wait_for_groups(reservations, monkeypatch):
    monkeypatch.setattr(reserve, "_state", lambda group: "CREATED")
    monkeypatch.setattr(reservations_module, "wait_until_free", lambda *_: None)
    reservations.for_new_engine()
    monkeypatch.undo()
    monkeypatch.setattr(reserve, "_state", lambda group: "PENDING")
    reservations.cancel()
    with pytest.raises(InitializationError, match="the engine was shut down"):
        reservations.for_growth([0])
