"""Makes a scenario that fails as small as possible, so that its story can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from simulation.scenario import Scenario
from simulation.world.kernel import Pace

T = TypeVar("T")

CALM = Pace(mean_pauses=200.0, cost_s=1e-5, by_priority=False, collections=0.0)
_PARTS = ("faults", "operations", "requests")
_MAX_CHANGES = 1 << 20


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """The smallest scenario found that still fails. `fails`: runs one, which has to be repeatable."""
    while True:
        smaller = _once(scenario, fails)
        if smaller == scenario:
            return scenario
        scenario = smaller


def _once(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    for part in _PARTS:
        scenario = _with_fewest(scenario, part, fails)
    for simpler in _simpler(scenario):
        if fails(simpler):
            scenario = simpler
            break
    return _with_fewest_changes(scenario, fails)


def _with_fewest(scenario: Scenario, part: str, fails: Callable[[Scenario], bool]) -> Scenario:
    kept = fewest(getattr(scenario, part), lambda items: fails(replace(scenario, **{part: items})))
    return replace(scenario, **{part: kept})


def fewest(items: Sequence[T], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """A part of `items`, in order, that still fails, and of which no item can be left out.

    Leaves out ever smaller runs of items.
    """
    kept = tuple(items)
    size = len(kept)
    while size:
        start = 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if fails(fewer):
                kept = fewer
            else:
                start += size
        size //= 2
    return kept


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios of which one thing is simpler."""
    if scenario.at_statements:
        yield replace(scenario, at_statements=False)
    if scenario.pace != CALM:
        yield replace(scenario, pace=CALM)
    for name in sorted(scenario.options):
        yield replace(scenario, options={key: value for key, value in scenario.options.items() if key != name})
    for index, request in enumerate(scenario.requests):
        for change in _simpler_requests(request):
            requests = (*scenario.requests[:index], change, *scenario.requests[index + 1 :])
            yield replace(scenario, requests=requests)
    if len(scenario.nodes) > 1:
        yield replace(scenario, nodes=scenario.nodes[:-1])


def _simpler_requests(request: Any) -> Iterator[Any]:
    plain: dict[str, Any] = {
        "n": 1,
        "seed": None,
        "priority": 0,
        "wants": {},
        "abort_after_s": None,
        "is_stream": True,
        "caller": 0,
    }
    for name, value in plain.items():
        if getattr(request, name) != value:
            yield replace(request, **{name: value})
    for name, value in request.wants.items():
        others = {other: own for other, own in request.wants.items() if other != name}
        yield replace(request, wants=others)
        for simpler in _simpler_want(name, value):
            yield replace(request, wants=others | {name: simpler})
    if request.max_tokens > 1:
        yield replace(request, max_tokens=request.max_tokens // 2)
    if len(request.prompt) > 1:
        yield replace(request, prompt=request.prompt[:-1])


def _simpler_want(name: str, value: Any) -> Iterator[Any]:
    from simulation.cluster.kinds import KINDS  # imported lazily: the world has to be in its place before the product

    return KINDS[name].simpler(value)


def _with_fewest_changes(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """The scenario with as few changes of threads where none is needed as it takes."""
    low, high = -1, scenario.num_free_changes
    if high is None:
        high = _MAX_CHANGES
        if not fails(replace(scenario, num_free_changes=high)):
            return scenario
    while high - low > 1:
        middle = (low + high) // 2
        if fails(replace(scenario, num_free_changes=middle)):
            high = middle
        else:
            low = middle
    return replace(scenario, num_free_changes=high)
