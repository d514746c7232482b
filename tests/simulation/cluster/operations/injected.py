"""Faults that are put into the product, to show that scenarios with operators find them.

    python -m simulation.cluster.operations.injected [--search] [FAULT ...]

with `tests` on the path. Plays for each the seed that is known to find it. With `--search`, looks for the first one,
also for faults of which none is known. Each is one that a change could bring in.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from simulation.installation import install
from simulation.putting_in import first_find, look_for_all

install()

from msgspec.structs import replace  # noqa: E402

from raycore.activity import RUNNING  # noqa: E402
from raycore.cluster.desired import Desired  # noqa: E402
from raycore.cluster.following import Following, Loops  # noqa: E402
from raycore.control.pauses import Pauses  # noqa: E402
from raycore.llm import AsyncLLM  # noqa: E402
from raycore.parts.adapters.control import AdapterCalls  # noqa: E402
from raycore.parts.weights.cluster import EngineWeights  # noqa: E402
from raycore.parts.weights.control import updates as weight_updates  # noqa: E402
from raycore.parts.weights.control.updates import WeightUpdates  # noqa: E402
from raycore.parts.weights.engine import RankWeights  # noqa: E402
from simulation.cluster.deployments import PLAIN  # noqa: E402
from simulation.cluster.making import scenario_of  # noqa: E402
from simulation.cluster.play import play  # noqa: E402
from simulation.scenario import Scenario  # noqa: E402

_MOST_SEEDS = 60


def what_was_computed_is_kept_over_updates() -> None:
    RankWeights._forget_computed = lambda self: None


def outputs_keep_the_first_name() -> None:
    original = RankWeights._take

    def take(self: RankWeights, *args: Any) -> None:
        version = self._engine.version
        original(self, *args)
        self._engine.version = version

    RankWeights._take = take


def ranks_that_could_not_follow_go_on() -> None:
    def adopt(self: WeightUpdates, update: Any, state: Any) -> None:
        update.ranks = self._joined()
        original(self, update, state)

    original = WeightUpdates._adopt
    WeightUpdates._adopt = adopt


def a_given_up_update_leaves_what_it_has_changed() -> None:
    def give_up(self: WeightUpdates, update: Any) -> None:
        self._ask([*update.ranks, *update.behind], "update_weights", ("cancel_weight_update",))
        self._end(update)

    WeightUpdates._give_up = give_up


def ranks_that_join_keep_the_weights_they_started_with() -> None:
    EngineWeights._get_weights = lambda self, *args: None


def ranks_that_join_do_not_wait_for_an_update() -> None:
    def join(self: Following, rank: Any, is_wanted: Any) -> None:
        for part in self._parts:
            part.bring(rank, self._desired.now, is_wanted)
        rank.has_joined = True

    Following.join = join


def updates_do_not_stop_steps() -> None:
    def hold(self: Pauses, call: str) -> None:
        self._is_held = True

    Pauses.hold = hold


def an_update_resumes_a_paused_engine() -> None:
    def release(self: Pauses) -> None:
        with self._next_change():
            self._is_held = False
            if not self.activity.asleep:
                self._resume()

    Pauses.release = release


def pauses_do_not_wait_for_ranks() -> None:
    Pauses._take_replies = lambda self, asked: {}


def ranks_that_join_are_not_told_of_pauses() -> None:
    original = Loops.tell

    def tell(self: Loops, ranks: Any, desired: Desired) -> Any:
        return original(self, ranks, desired if desired.activity.asleep else replace(desired, activity=RUNNING))

    Loops.tell = tell


def dropped_weights_keep_their_name() -> None:
    def after(self: WeightUpdates, *, were_dropped: bool, are_read: bool) -> None:
        self._weights.note_wake_up()

    WeightUpdates._after_wake_up = after


def a_pause_is_not_told() -> None:
    async def is_so(self: AsyncLLM) -> bool:
        return False

    AsyncLLM.is_paused = AsyncLLM.is_sleeping = is_so


def updates_that_overlap_are_not_refused() -> None:
    def reload(self: WeightUpdates, path: str | None, name: object = None) -> None:
        self._update = None
        original(self, path, name)

    original = WeightUpdates.reload
    WeightUpdates.reload = reload


def engines_that_sleep_may_be_resumed() -> None:
    def resume(self: Pauses) -> None:
        if not self.activity.asleep:
            original(self)

    original = Pauses.resume
    Pauses.resume = resume


def an_update_never_ends() -> None:
    original = EngineWeights.close

    def close(self: EngineWeights) -> None:
        if self.latest.version.number % 2 == 0:
            original(self)

    EngineWeights.close = close


def other_weights_keep_the_name_of_the_checkpoint() -> None:
    original = EngineWeights.set

    def keep(self: EngineWeights, state: Any, current: Any) -> None:
        original(self, replace(state, version=replace_name(state.version, self.latest.version.name)), current)

    def replace_name(version: Any, name: str) -> Any:
        return version._replace(name=name)

    EngineWeights.set = keep


def ranks_do_not_hear_of_other_adapters() -> None:
    AdapterCalls._tell = lambda self, added, wanted: self._desired.change(adapters=added)


def updates_fail_by_the_end_of_a_worker() -> None:
    weight_updates._LOSSES = ()


FAULTS: dict[Callable[[], None], tuple[int | None, tuple[str, ...]]] = {
    what_was_computed_is_kept_over_updates: (8, ("reload_weights", "finish_weight_update")),
    outputs_keep_the_first_name: (3, ("reload_weights", "finish_weight_update")),
    ranks_that_could_not_follow_go_on: (3, ("update_weights",)),
    a_given_up_update_leaves_what_it_has_changed: (90, ("cancel_weight_update",)),
    ranks_that_join_keep_the_weights_they_started_with: (3, ("finish_weight_update",)),
    ranks_that_join_do_not_wait_for_an_update: (None, ("finish_weight_update",)),
    updates_do_not_stop_steps: (8, ("finish_weight_update",)),
    an_update_resumes_a_paused_engine: (None, ("pause_generation", "sleep")),
    pauses_do_not_wait_for_ranks: (None, ("pause_generation", "sleep")),
    ranks_that_join_are_not_told_of_pauses: (None, ("pause_generation",)),
    dropped_weights_keep_their_name: (17, ("sleep",)),
    a_pause_is_not_told: (3, ("is_paused", "is_sleeping")),
    updates_that_overlap_are_not_refused: (None, ("reload_weights",)),
    engines_that_sleep_may_be_resumed: (65, ("resume_generation",)),
    an_update_never_ends: (12, ("reload_weights",)),
    other_weights_keep_the_name_of_the_checkpoint: (3, ("reload_weights", "finish_weight_update")),
    ranks_do_not_hear_of_other_adapters: (292, ("add_lora",)),
    updates_fail_by_the_end_of_a_worker: (8, ("update_weights",)),
}
"""A seed that finds it, or None if none is known, and the kinds of operations one of which a scenario needs for it."""
DEPLOYMENTS: dict[Callable[[], None], str] = {updates_fail_by_the_end_of_a_worker: "updates"}
"""By the fault: of which engines these seeds are, if they aren't plain."""


def _scenarios(put_in: Callable[[], None], wants_search: bool) -> Iterator[Scenario]:
    known, kinds = FAULTS[put_in]
    scenario_of_seed = partial(scenario_of, capability=DEPLOYMENTS.get(put_in, PLAIN))
    if not wants_search and known is not None:
        return iter([scenario_of_seed(known)])
    found = (
        scenario
        for scenario in map(scenario_of_seed, itertools.count())
        if any(operation.kind in kinds for operation in scenario.operations)
    )
    return itertools.islice(found, _MOST_SEEDS)


def _find(put_in: Callable[[], None], wants_search: bool) -> str | None:
    put_in()
    return first_find(play, _scenarios(put_in, wants_search))


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation.cluster.operations.injected")
    parser.add_argument("faults", nargs="*", help="by default all")
    parser.add_argument("--search", action="store_true", help="look for the first seed that finds it")
    given = parser.parse_args()
    names = given.faults or [each.__name__ for each, (known, _) in FAULTS.items() if known is not None or given.search]
    return look_for_all(
        (each.__name__, partial(_find, each, given.search)) for each in FAULTS if each.__name__ in names
    )


if __name__ == "__main__":
    sys.exit(main())
