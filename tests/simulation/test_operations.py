"""What follows from operators' calls, by their times, and whether scenarios find what is put into the product."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.errors import InvalidInput, RaycoreError
from simulation.cluster.operations.causes import unexplained
from simulation.cluster.operations.checkpoints import path_of
from simulation.cluster.operations.conditions import ASLEEP, PAUSED, updating
from simulation.cluster.operations.contract import Capability, History, may_refuse, operation
from simulation.cluster.operations.deeds import waits_for_wake_ups
from simulation.cluster.operations.weights import WeightNames
from simulation.cluster.records import Deed
from simulation.forking import Programs
from simulation.worker import model


def deed(
    kind: str, began_s: float, ended_s: float | None, error: BaseException | None = None, **arguments: object
) -> Deed:
    return Deed(operation(began_s, kind, **arguments), began_s, ended_s, error, version="default")


def history(*deeds: Deed, broken_s: Sequence[float] = ()) -> History:
    return History(deeds, broken_s, options={})


def test_a_sleep_holds_until_a_call_that_may_wake_it():
    sleep, wake, asked = deed("sleep", 1, 2, level=1), deed("wake_up", 5, 6), deed("reload_weights", 3, 4)
    asleep = ASLEEP["weights"]
    assert asleep.must_hold(history(sleep, asked, wake), asked)
    assert may_refuse((asleep, False), history=history(sleep, asked, wake), deed=asked) is True
    later = deed("reload_weights", 7, 8)
    assert may_refuse((asleep, False), history=history(sleep, wake, later), deed=later) is False
    meanwhile = deed("reload_weights", 5.5, 7)
    assert may_refuse((asleep, False), history=history(sleep, wake, meanwhile), deed=meanwhile) is None
    part = deed("wake_up", 5, 6, tags=["kv_cache"])
    assert asleep.must_hold(history(sleep, part, later), later)


def test_an_update_is_over_when_it_fails_but_not_when_it_is_refused():
    start, after = deed("start_weight_update", 0, 1), deed("finish_weight_update", 4, 5)
    for error, is_under_way in ((InvalidInput("no such part"), True), (RuntimeError("lost"), False)):
        told = history(start, deed("update_weights", 2, 3, error), after)
        assert updating(told).may_hold(told, after) is is_under_way


def test_a_pause_holds_until_the_next_call_that_may_end_it():
    pause, resume = deed("pause_generation", 1, 2, mode="keep"), deed("resume_generation", 3, 4)
    assert PAUSED.until(history(pause, resume), pause) == 3
    assert PAUSED.until(history(pause), pause) == float("inf")


def test_names_stand_for_what_calls_have_brought():
    config = resolve(demo_model_path(), None)
    first, brought, read = (model.weights_of(each) for each in (demo_model_path(), "a trainer's", path_of(3)))
    names = WeightNames(
        history(
            deed("start_weight_update", 1, 2),
            deed("update_weights", 2, 3, checkpoint="a trainer's", names=["head"]),
            deed("update_weights", 3, 4, InvalidInput("no"), checkpoint="a trainer's", names=["first"]),
            deed("finish_weight_update", 5, 6, weight_version="new"),
            deed("reload_weights", 8, 9, checkpoint=3, weight_version="read"),
            deed("load_weights", 10, 11, name="head", number=7),
        ),
        config,
    )
    (new,) = names.contents("new")
    assert new.tolist() == [*first[:3], brought[3]]
    assert [each.tolist() for each in names.contents("read")] == [read.tolist(), [*read[:3], 7]]
    assert not names.contents("none")
    assert [names.is_over("new", at_s) for at_s in (5, 8, 9)] == [False, False, True]
    assert names.may_follow("default", "new")
    assert not names.may_follow("read", "new")


def test_a_cancelled_update_gives_no_name():
    names = WeightNames(
        history(
            deed("start_weight_update", 1, 2),
            deed("update_weights", 2, 3, checkpoint="a trainer's", names=["head"]),
            deed("cancel_weight_update", 3, 4),
            deed("finish_weight_update", 5, 6, InvalidInput("no update"), weight_version="new"),
        ),
        resolve(demo_model_path(), None),
    )
    assert not names.contents("new")
    assert not names.is_over("default", 10)


def test_the_contract_demands_nothing_by_itself():
    plain, told = deed("scale", 0, 1), history()
    assert list(Capability().problems(plain, told)) == []
    assert Capability().refuses(plain, told) is False
    assert not Capability().excuses(plain, RuntimeError("any"), told)


def test_what_breaks_excuses_only_what_ends_afterwards():
    failed = deed("scale", 1, 3, RuntimeError("any"))
    assert Capability().excuses(failed, RuntimeError("any"), history(failed, broken_s=[2]))
    assert not Capability().excuses(failed, RuntimeError("any"), history(failed, broken_s=[4]))


@pytest.mark.parametrize(
    ("kind", "seconds", "said", "is_explained"),
    [
        ("start_weight_update", 10, "all ranks were lost, so the update of weights has ended", False),
        ("reload_weights", 301, "all ranks were lost, so the update of weights has ended", True),
        ("update_weights", 10, "all ranks were lost, so the update of weights has ended", True),
        ("update_weights", 10, "dp_rank 1 hasn't ended f() within weight_update_timeout_s=300", False),
        ("update_weights", 300, "dp_rank 1 hasn't ended f() within weight_update_timeout_s=300", True),
        ("reload_weights", 1, "f(): dp_rank 1: the weights can't be read any further", True),
        ("reload_weights", 1, "f(): dp_rank 0: the weights can't be read any further", False),
        ("reload_weights", 1, "another reason", True),
    ],
)
def test_the_cause_that_an_error_names_has_to_explain_it(kind: str, seconds: float, said: str, is_explained: bool):
    broken, failed = deed("break_worker", 0, 1, dp_rank=1, worker=0, after=0), deed(kind, 2, 2 + seconds)
    found = unexplained(failed, RaycoreError(said), history(broken, failed, broken_s=[0]))
    assert (found is None) == is_explained


def test_no_call_waits_until_the_engine_wakes_up():
    sleep, wake = deed("sleep", 1, 2, level=1), deed("wake_up", 20, 21)
    late, quick, scaling = deed("add_lora", 1.5, 20.5), deed("add_lora", 1.5, 6.5), deed("scale", 1.5, 20.5)
    (said,) = waits_for_wake_ups(history(sleep, late, wake))
    assert said.startswith("add_lora {} went on for 18.0 s while the engine slept, from 2.0000 s on")
    assert not list(waits_for_wake_ups(history(sleep, quick, wake)))
    assert not list(waits_for_wake_ups(history(sleep, scaling, late, wake)))
    assert not list(waits_for_wake_ups(history(sleep, late, wake, broken_s=[3])))


@pytest.mark.timeout(1600)
def test_what_is_put_in_is_found(programs: Programs):
    found = programs.run("simulation.cluster.operations.injected")
    assert found.returncode == 0, found.stdout + found.stderr
    assert len(found.stdout.splitlines()) == 13
