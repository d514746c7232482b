"""Scenarios as text, and the smallest one that still fails."""

from __future__ import annotations

import random

import msgspec
import pytest

from simulation.scenario import AtMessage, Fault, Moment, Operation, Request, Scenario, from_json, to_json
from simulation.shrinking import CALM, fewest, shrink


def made(seed: int) -> Scenario:
    drawn = random.Random(seed)
    return Scenario(
        seed=seed,
        options={"data_parallel_size": 2, "enable_prefix_caching": False},
        nodes=({"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}),
        requests=tuple(
            Request(at_s=number / 10, prompt=((1, 30), (number, 5)), max_tokens=64, n=drawn.randint(1, 3), priority=2)
            for number in range(20)
        ),
        operations=(Operation(at_s=1.0, kind="scale", arguments={"to": 3}), Operation(at_s=2.0, kind="pause")),
        faults=(
            Fault(when=Moment(0.5), kind="kill", target=1),
            Fault(when=AtMessage("submit", "received", 3), kind="stop", for_s=2.0),
        ),
        at_statements=True,
    )


def test_a_scenario_is_the_same_after_a_file():
    scenario = made(3)
    assert from_json(to_json(scenario)) == scenario
    assert from_json(to_json(Scenario(seed=1))) == Scenario(seed=1)


def test_a_file_that_is_no_scenario_names_the_place():
    with pytest.raises(msgspec.ValidationError, match=r"\$\.faults\[0\]\.when"):
        from_json('{"seed": 1, "faults": [{"when": {"type": "Moment", "at_s": "x"}, "kind": "kill"}]}')


def test_nothing_that_matters_is_left_out_and_all_else_is():
    def fails(scenario: Scenario) -> bool:
        return (
            any(fault.kind == "stop" for fault in scenario.faults)
            and any(request.prompt[-1] == (7, 5) for request in scenario.requests)
            and len(scenario.requests) >= 2
            and scenario.options.get("data_parallel_size") == 2
            and (scenario.num_free_changes is None or scenario.num_free_changes >= 37)
        )

    small = shrink(made(1), fails)
    assert fails(small)
    assert [fault.kind for fault in small.faults] == ["stop"]
    assert small.operations == ()
    assert len(small.requests) == 2
    assert small.options == {"data_parallel_size": 2}
    assert small.num_free_changes == 37
    assert small.pace == CALM
    assert not small.at_statements
    assert small.nodes == ({"CPU": 4.0},)
    assert all(request.max_tokens == 1 and request.priority == 0 and request.n == 1 for request in small.requests)


@pytest.mark.parametrize("needed", [(), (0,), (99,), (3, 4, 50), tuple(range(0, 100, 9))])
def test_the_fewest_items_are_those_that_are_needed(needed: tuple[int, ...]):
    assert fewest(range(100), lambda items: set(needed) <= set(items)) == needed
