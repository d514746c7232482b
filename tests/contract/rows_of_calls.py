"""Calls, results, waiting, and streams."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray_probe import start
from rays import LONG_S, Row, error_of, eventually, kind, outcome, row_in

CALLS: list[Row] = []
row = row_in(CALLS)

# ---- order


@row([value for number in range(20) for value in (number, number + 100)])
def calls_of_one_thread_run_in_the_order_in_which_they_were_made(ray: Any) -> object:
    probe = start(ray)
    for number in range(20):
        probe.tell.remote(number)
        probe.add.remote(number + 100)
    return ray.get(probe.look.remote())


@row(([1], 1, "held"))
def a_long_call_holds_up_no_other_group(ray: Any) -> object:
    probe = start(ray)
    held = probe.hold.remote()
    return ray.get(probe.add.remote(1)), ray.get(probe.wait_for_held.remote(1)), released(ray, probe, held)


@row(([1, 2], [1, 2, 3]))
def a_group_runs_as_many_calls_at_once_as_it_has_threads(ray: Any) -> object:
    probe = start(ray)
    refs = [probe.hold_beside.remote(number) for number in (1, 2, 3)]
    ray.get(probe.wait_for_held.remote(2))
    ray.sleep(0.05)
    return sorted(ray.get(probe.look.remote())), released(ray, probe, refs)


def released(ray: Any, probe: Any, refs: Any) -> Any:
    ray.get(probe.open.remote())
    return ray.get(refs)


@row(["slow", "later"])
def a_call_waits_for_its_arguments_and_holds_back_later_ones_of_its_group(ray: Any) -> object:
    probe, other = start(ray), start(ray)
    slow = other.hold.remote("slow")
    probe.add.remote(slow)
    later = probe.add.remote("later")
    ray.get(other.wait_for_held.remote(1))
    ray.sleep(0.05)
    ray.get(other.open.remote())
    return ray.get(later)


@row(("GetTimeoutError", "held back", "GetTimeoutError"))
def a_call_that_waits_for_its_arguments_holds_back_those_of_all_groups(ray: Any) -> object:
    probe, other = start(ray), start(ray)
    ray.get(probe.pid.remote())
    waits = probe.add.remote(other.hold.remote("slow"))
    later = probe.echo.remote("held back")
    early = outcome(later, 0.3)
    by_another = outcome(other.get_first.remote([waits]), 0.1)
    ray.get(other.open.remote())
    ray.get(waits)
    return early, ray.get(later), by_another


@row("not held back")
def a_call_that_waits_for_its_arguments_holds_back_no_other_caller(ray: Any) -> object:
    probe, caller, other = start(ray), start(ray), start(ray)
    waits = probe.add.remote(other.hold.remote("slow"))
    ray.get(caller.keep.remote([probe]))
    value = ray.get(caller.call_kept.remote())
    released(ray, other, waits)
    return isinstance(value, int) and "not held back"


# ---- values


@row(([["sent"], ["sent"]], ["sent"]))
def values_are_copied_when_the_call_is_made(ray: Any) -> object:
    probe, sent = start(ray), ["sent"]
    probe.tell.remote(sent)
    answer = probe.add.remote(sent)
    sent.append("too late")
    first = ray.get(answer)
    first[0].append("mine")
    return ray.get(probe.look.remote()), ray.get(probe.look.remote())[0]


@row(("int", "ObjectRef", 5))
def a_ref_as_an_argument_is_replaced_by_its_value_and_not_in_a_list(ray: Any) -> object:
    probe = start(ray)
    five = probe.echo.remote(5)
    inner = ray.get(probe.echo.remote([five]))
    return ray.get(probe.type_of.remote(five)), kind_of(inner[0]), ray.get(probe.get_first.remote([five]))


def kind_of(value: object) -> str:
    return type(value).__name__


@row((True, True, True, True))
def refs_are_equal_by_their_object(ray: Any) -> object:
    probe = start(ray)
    ref, other = probe.echo.remote(1), probe.echo.remote(1)
    (same,) = ray.wait([ref], timeout=LONG_S)[0]
    return ref == same, hash(ref) == hash(same), ref != other, len({ref, same, other}) == 2


@row((None, ["raises", "next"]))
def a_call_without_results_returns_nothing_and_fails_unheard(ray: Any) -> object:
    probe = start(ray)
    return probe.tell.remote("raises"), ray.get(probe.add.remote("next"))


@row(("AttributeError", "TypeError"))
def what_cant_be_called_or_sent_fails_at_once(ray: Any) -> object:
    probe = start(ray)
    return raised(lambda: probe.no_such_method), raised(lambda: probe.add.remote(number for number in ()))


def raised(act: Any) -> str:
    try:
        act()
    except Exception as error:
        return kind(error)
    return "nothing"


# ---- errors


@row(("RayTaskError(KeyError)", True, True, "KeyError", "KeyError: 'lost'"))
def an_exception_comes_as_a_task_error_that_is_also_of_its_class(ray: Any) -> object:
    error: Any = error_of(start(ray).fail.remote())
    is_both = isinstance(error, RayTaskError), isinstance(error, KeyError)
    return kind(error), *is_both, kind(error.cause), str(error).splitlines()[-1]


@row(("RayTaskError", "RayError"))
def an_exception_that_cant_be_pickled_has_another_cause(ray: Any) -> object:
    error: Any = error_of(start(ray).fail.remote("unpicklable"))
    return kind(error), kind(error.cause)


@row(("UnserializableException", False, True))
def an_exception_that_cant_be_unpickled_is_no_task_error(ray: Any) -> object:
    error = error_of(start(ray).fail.remote("two arguments"))
    return kind(error), isinstance(error, RayTaskError), "one and two" in str(error)


@row(("RayTaskError", "NoBase"))
def an_exception_from_which_no_class_can_be_derived_is_a_task_error_only(ray: Any) -> object:
    error: Any = error_of(start(ray).fail.remote("no base"))
    return kind(error), kind(error.cause)


@row(("RayTaskError(KeyError)", "KeyError"))
def a_call_whose_argument_has_failed_fails_with_its_error(ray: Any) -> object:
    probe = start(ray)
    error: Any = error_of(probe.add.remote(probe.fail.remote()))
    return kind(error), kind(error.cause)


@row("RayTaskError(ActorDiedError)")
def a_call_whose_arguments_actor_has_died_fails_with_that(ray: Any) -> object:
    probe, other = start(ray), start(ray)
    lost = other.hold.remote()
    waits = probe.add.remote(lost)
    ray.kill(other)
    return outcome(waits)


@row(("GetTimeoutError", "GetTimeoutError", 1))
def a_get_that_waits_too_long_raises_and_of_0_seconds_it_looks(ray: Any) -> object:
    probe = start(ray)
    held, done = probe.hold.remote(), probe.add.remote(1)
    ray.get(done)
    found = outcome(held, 0), outcome(held, 0.05), outcome(done, 0)[0]
    released(ray, probe, held)
    return found


@row(("RayTaskError(KeyError)", "RayTaskError(KeyError)"))
def a_get_of_several_raises_without_waiting_for_the_others(ray: Any) -> object:
    probe, other = start(ray), start(ray)
    held, failed = probe.hold.remote(), other.fail.remote()
    found = outcome([failed, held], 60), outcome([held, failed], 60)
    released(ray, probe, held)
    return found


@row(("RayTaskError(KeyError)", "RayTaskError"))
def the_first_error_in_a_list_is_raised(ray: Any) -> object:
    probe = start(ray)
    failed, bad = probe.fail.remote(), probe.fail.remote("no base")
    ray.wait([failed, bad], num_returns=2, timeout=LONG_S)
    return outcome([failed, bad]), outcome([bad, failed])


# ---- waiting


@row(([1, 2], [0, 3], [1], [0, 2, 3], [0, 1, 2, 3]), ([1, 2], [0, 3], [2], [0, 1, 3], [0, 1, 2, 3]))
def a_wait_keeps_the_order_and_returns_no_more_than_asked_for(ray: Any) -> object:
    probe, other = start(ray), start(ray)
    refs = [probe.hold.remote(), other.echo.remote(), other.fail.remote(), probe.hold.remote()]
    ray.get(refs[1])
    number = {ref: index for index, ref in enumerate(refs)}
    two = [[number[ref] for ref in part] for part in ray.wait(refs, num_returns=2, timeout=LONG_S)]
    one = [[number[ref] for ref in part] for part in ray.wait(refs, num_returns=1, timeout=LONG_S)]
    ray.get(probe.open.remote())
    done, _ = ray.wait(refs, num_returns=4, timeout=LONG_S)
    return *two, *one, [number[ref] for ref in done]


@row(([], 1, [], 0))
def a_wait_may_return_fewer_when_its_time_is_over_and_of_nothing_at_once(ray: Any) -> object:
    probe = start(ray)
    held = probe.hold.remote()
    done, left = ray.wait([held], timeout=0.05)
    none = ray.wait([])
    released(ray, probe, held)
    return done, len(left), none[0], len(none[1])


@row(("ValueError", "ValueError", "ValueError", "ValueError", "TypeError", "TypeError"))
def a_wait_that_cant_be_is_refused(ray: Any) -> object:
    ref = start(ray).echo.remote()
    bad = [([ref, ref], {}), ([ref], {"num_returns": 2}), ([ref], {"num_returns": 0}), ([ref], {"timeout": -1})]
    bad += [(ref, {}), ((ref,), {})]
    return tuple(raised(lambda refs=refs, options=options: ray.wait(refs, **options)) for refs, options in bad)


@row(([1], 1, True, "RayTaskError(KeyError)", True))
def futures_get_the_result_on_a_thread_of_rays(ray: Any) -> object:
    probe = start(ray)
    own, heard = ray.current_thread(), []
    ref = probe.add.remote(1)
    future, again = ref.future(), ref.future()
    future.add_done_callback(lambda _: heard.append(ray.current_thread()))
    value = future.result(LONG_S)
    eventually(lambda: heard, "the callback isn't called")
    failed = probe.fail.remote().future().exception(LONG_S)
    return value, len(heard), heard[0] is not own, kind(failed), again.result(LONG_S) == value


# ---- streams


def stream_of(probe: Any, *args: Any, **kwargs: Any) -> Any:
    return probe.outputs.options(num_returns="streaming").remote(*args, **kwargs)


def items(ray: Any, stream: Any) -> list[object]:
    """The values of a stream's refs, or the names of their errors, until it ends."""
    return [outcome(ref) for ref in stream]


@row((list(range(20)), [], []))
def a_stream_gives_all_items_in_order_and_ends_for_good(ray: Any) -> object:
    stream = stream_of(start(ray), 20)
    return items(ray, stream), items(ray, stream), items(ray, stream_of(start(ray), 0))


@row(([0, 1], False, [2]))
def an_item_is_there_before_the_call_has_ended(ray: Any) -> object:
    probe = start(ray)
    stream = stream_of(probe, 3, held_at=2)
    early = [ray.get(next(stream)) for _ in range(2)]
    done, _ = ray.wait([stream], timeout=0.05)
    ray.get(probe.open.remote())
    return early, bool(done), items(ray, stream)


@row(([True, True, True], [0, 1], [True]))
def a_stream_in_a_wait_is_ready_if_there_is_an_item_or_its_end(ray: Any) -> object:
    stream = stream_of(start(ray), 2)
    ready, found = [], []
    for _ in range(2):
        done, _ = ray.wait([stream], timeout=LONG_S)
        ready.append(done == [stream])
        found.append(ray.get(next(stream)))
    done, _ = ray.wait([stream], timeout=LONG_S)
    ready.append(done == [stream])
    assert not items(ray, stream)
    return ready, found, [ray.wait([stream], timeout=LONG_S)[0] == [stream]]


@row([0, 1, "RayTaskError(KeyError)"])
def an_exception_in_a_stream_is_its_last_item(ray: Any) -> object:
    return items(ray, stream_of(start(ray), 5, fails_at=2))


@row(
    ([0, 1], ["ActorDiedError"], ["ActorDiedError"]),
    seldom=(([0, 1], ["ActorUnavailableError"], ["ActorDiedError"]),),
)
def a_stream_whose_actor_dies_ends_with_one_error(ray: Any) -> object:
    probe = start(ray)
    pid = ray.get(probe.pid.remote())
    stream = stream_of(probe, 5, held_at=2)
    early = [ray.get(next(stream)) for _ in range(2)]
    ray.end(pid)
    late = items(ray, stream)
    eventually(lambda: ray.state_of(probe) == "DEAD", "Ray doesn't see that it has died")
    return early, late, items(ray, stream_of(probe, 5))


@row([0, 1, "ActorDiedError"])
def a_stream_ends_with_an_error_when_its_actor_is_killed(ray: Any) -> object:
    probe = start(ray)
    stream = stream_of(probe, 5, held_at=2)
    early = [ray.get(next(stream)) for _ in range(2)]
    ray.kill(probe)
    return early + items(ray, stream)


@row(([0], [0, 1, 2, 3]))
def an_actor_isnt_told_that_nobody_reads_its_stream_any_more(ray: Any) -> object:
    probe = start(ray)
    stream = stream_of(probe, 4, held_at=2)
    first = [ray.get(next(stream))]
    del stream
    ray.get(probe.wait_for_held.remote(1))
    ray.sleep(0.1)
    ray.get(probe.open.remote())
    return first, eventually(lambda: len(seen := ray.get(probe.look.remote())) == 4 and seen, "the stream has stopped")


@row((2, True))
def streams_of_one_group_run_side_by_side(ray: Any) -> object:
    probe = start(ray)
    first, second = stream_of(probe, 3, held_at=2), stream_of(probe, 3, held_at=2)
    for stream in (first, second):
        ray.get(next(stream))
    held = ray.get(probe.wait_for_held.remote(2))
    ray.get(probe.open.remote())
    return held, isinstance(items(ray, first), list)


def expected(ray: Any, stream: Any) -> tuple[bool, Any]:
    """Whether a stream's next item is known, and a future of it."""
    ref, is_known = ray.peek(stream)
    return is_known, ref.future()


def ends_with(future: Any) -> object:
    """A future's value, or the name of its error."""
    error = future.exception(LONG_S)
    return future.result() if error is None else kind(error)


@row((False, 0, False, 1, False, "ObjectRefStreamEndOfStreamError", []))
def the_next_item_of_a_stream_can_be_awaited_before_it_comes_and_the_end_is_an_error(ray: Any) -> object:
    probe = start(ray)
    stream = stream_of(probe, 2, held_at=0)
    found: list[object] = []
    for _ in range(2):
        is_known, future = expected(ray, stream)
        ray.get(probe.open.remote())
        value = ends_with(future)
        assert ray.get(next(stream)) == value
        found += [False if found else is_known, value]
    value = ends_with(expected(ray, stream)[1])
    return *found, False, value, items(ray, stream)


@row(
    (False, "ActorDiedError", ["ActorDiedError"]),
    seldom=((False, "ActorUnavailableError", ["ActorUnavailableError"]),),
)
def an_item_that_is_awaited_fails_with_its_actor(ray: Any) -> object:
    probe = start(ray)
    stream = stream_of(probe, 2, held_at=0)
    ray.get(probe.wait_for_held.remote(1))
    is_known, future = expected(ray, stream)
    ray.kill(probe)
    return is_known, ends_with(future), items(ray, stream)


@row(("RayTaskError(KeyError)", ["RayTaskError(KeyError)"]))
def an_exception_in_a_stream_is_an_item_that_can_be_awaited(ray: Any) -> object:
    stream = stream_of(start(ray), 2, fails_at=0)
    return ends_with(expected(ray, stream)[1]), items(ray, stream)


# ---- which error is which


@row((False, True, True, False, False, False, False, True))
def which_errors_are_the_same_kind(ray: Any) -> object:
    """The simulated Ray raises Ray's own exceptions."""
    from ray import exceptions as of

    return (
        issubclass(of.OutOfMemoryError, RayActorError),
        issubclass(of.ActorDiedError, RayActorError),
        issubclass(of.ActorUnavailableError, RayActorError),
        issubclass(of.ActorUnavailableError, of.ActorDiedError),
        issubclass(of.ActorUnschedulableError, RayActorError),
        issubclass(of.TaskCancelledError, RayActorError),
        issubclass(of.ActorPlacementGroupRemoved, RayActorError),
        issubclass(of.OwnerDiedError, of.ObjectLostError),
    )
