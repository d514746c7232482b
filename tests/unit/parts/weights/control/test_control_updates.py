"""What the driver does to update weights, with ranks that only take notes of what weights they have."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ray.exceptions import RayActorError, RayTaskError
from replies_of_ranks import use_futures
from waiting import LONG_S, eventually

from raycore.activity import RUNNING, Activity
from raycore.cluster.desired import Desired, DesiredNow, DesiredWeights
from raycore.cluster.following import DesiredPart, Following
from raycore.cluster.rank import Rank
from raycore.control.pauses import OnWoken
from raycore.engine.rank_events import RankUp
from raycore.errors import (
    EngineDeadError,
    InitializationError,
    InvalidInput,
    RaycoreError,
    RpcTimeout,
    WorkerDied,
    WorkerFailed,
)
from raycore.messages import FIRST_WEIGHTS
from raycore.parts.weights.cluster import EngineWeights
from raycore.parts.weights.control import updates as weight_updates
from raycore.parts.weights.control.updates import WeightUpdates

BASE, OTHER = "/base", "/other"
CHANGES = ("update_weights", "reload_from", "import_weights")
"""The methods of workers after whose failure their weights may be anything."""
LOSSES = (RayActorError, WorkerDied, EngineDeadError)
"""What calls of a rank raise that is ending."""


class Damaged(InvalidInput):
    """A file is damaged, which is noticed after some weights have changed."""


class FakeRank(Rank):
    """A rank whose workers know the weights that they have: a path, or what updates have brought."""

    def __init__(self, engine: Engine, dp_rank: int, path: str = BASE) -> None:
        super().__init__(dp_rank, None, ["node"], self, None)  # type: ignore[arg-type]
        self.engine = engine
        self.info = SimpleNamespace(pid=dp_rank)  # type: ignore[assignment]
        self.run_ref = object()  # type: ignore[assignment]
        engine.weights.loaded(self, path)
        self.has = path
        """The weights of its workers; `half` while an update has changed some."""
        self.brought: str | None = None
        self.is_open = self.needs_all = False
        self.num_exported = 0
        self.known_by = path
        """What everything is known by that it computes: a path, a key of the engine's, or nothing that others know."""
        self.told: tuple[Any, ...] = ()
        """The last version that its outputs say."""
        self.is_dead = False
        self.fails: dict[str, BaseException] = {}
        """By method of workers: what the next call raises."""
        self.keeps_failing = False
        self.asked: list[str] = []

    @property
    def utility(self) -> Any:
        return SimpleNamespace(remote=self._remote)

    def _remote(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float) -> Future[Any]:
        reply = Future[Any]()
        try:
            if self.is_dead:
                raise RayActorError()
            name = args[0] if method == "update_weights" else method
            self.asked.append(name)
            error = self.fails.get(name) if self.keeps_failing else self.fails.pop(name, None)
            if type(error) is TimeoutError:
                return reply
            if error is not None:
                self.num_exported += name == "export_weights"  # another worker has done it
                is_halfway = isinstance(error, Damaged) and name == "reload_from"
                if is_halfway or (isinstance(error, WorkerFailed) and name in CHANGES):
                    self.has, self.known_by = "half", ""
                if isinstance(error, LOSSES):
                    self.engine.kill(self)
                raise error
            own = args if method != "update_weights" else args[1] if len(args) > 1 else ()
            answer = getattr(self, f"_{name}")(*own)
            reply.set_result(answer)
        except RayActorError as error:
            reply.set_exception(error)
        except Exception as error:
            reply.set_exception(RayTaskError("utility", "traceback", error).as_instanceof_cause())
        return reply

    def _start_weight_update(self, needs_all: bool = False) -> list[None]:
        assert not self.is_open
        assert self.engine.activity.is_paused, "no step may run"
        assert needs_all == self.weights.is_stale
        self.is_open, self.brought, self.needs_all = True, None, needs_all
        return [None]

    def _update_weights(self, info: Any) -> list[None]:
        assert self.is_open
        if info == "unknown":
            raise InvalidInput("the model has no tensor 'unknown'")
        self.brought, self.has, self.known_by = info, "half", ""
        return [None]

    def _finish_weight_update(self) -> list[None]:
        assert self.is_open
        if self.needs_all and self.brought is None:
            raise InvalidInput("the update lacks 7 tensors")
        self.is_open, self.has = False, self.brought or self.has
        return [None]

    def _cancel_weight_update(self) -> list[bool]:
        was_open, self.is_open = self.is_open, False
        return [was_open and self.brought is not None]

    def _reload_from(self, path: str) -> list[None]:
        if path in self.engine.gone:
            raise InvalidInput(f"{path} isn't there")
        self.has = self.known_by = path
        return [None]

    def _weights_checksum(self) -> list[str]:
        return [self.has]

    def _export_weights(self) -> list[Any]:
        self.num_exported += 1
        return [self.has, self.has]

    def _import_weights(self, pieces: list[Any]) -> list[None]:
        assert not self.is_open
        self.has, self.known_by = pieces[0], ""
        return [None, None]

    def _release_exported_weights(self) -> list[None]:
        self.num_exported = 0
        return [None, None]

    def _init_weight_transfer_engine(self, info: Any) -> list[None]:
        return [None]

    def _take_weights(self, number: int, name: str, is_new: bool, key: str = "") -> None:
        self.told = (number, name, is_new)
        self.known_by = key or self.known_by


class Engine:
    """Ranks, and what the driver has: the manager, the supervisor, the clients, the pauses. `log` has what happened."""

    all: ClassVar[list[Engine]] = []

    def __init__(self, num_ranks: int = 2, timeout_s: float = LONG_S, *, can_copy: bool = False) -> None:
        self.all.append(self)
        self.log: list[tuple[Any, ...]] = []
        self.has_ended = False
        self.given_up: set[int] = set()
        self.gone: set[str] = set()
        """Checkpoints whose files aren't there any more."""
        self.on_woken: OnWoken
        self.ranks: dict[int, FakeRank] = {}
        self.in_service: set[int] = set()
        self.stale: list[tuple[int, str]] = []
        clock = SimpleNamespace(now_s=time.monotonic)
        runtime = SimpleNamespace(wait=_wait, get=lambda ref: ref.result(), clock=clock)
        self.desired = DesiredNow(Desired(DesiredWeights(FIRST_WEIGHTS, BASE)), lambda: list(self.ranks.values()))
        self.weights = EngineWeights(self.desired, runtime, timeout_s, can_copy=can_copy)  # type: ignore[arg-type]
        self.weights.on_stale_rank = lambda dp_rank, reason: self.stale.append((dp_rank, reason))
        self.is_lockstep = False
        self.path = BASE
        self.spec = SimpleNamespace(why_weights_stay=None)
        config: Any = SimpleNamespace(
            recovery=SimpleNamespace(weight_update_timeout_s=timeout_s),
            parallel=SimpleNamespace(world_size=2),
            model=SimpleNamespace(spec=self.spec),
        )
        self.updates = WeightUpdates(self, self, self, self, config)  # type: ignore[arg-type]
        for dp_rank in range(num_ranks):
            self.add(dp_rank)

    def add(self, dp_rank: int, path: str | None = None) -> FakeRank:
        """A rank starts and joins, as `CoreEngineActorManager.confirm` does."""
        rank = self.ranks[dp_rank] = FakeRank(self, dp_rank, path or self.path)
        self.join(rank)
        self.weights.announce(self, [rank])
        return rank

    def join(self, rank: FakeRank, *before: DesiredPart, is_wanted: bool = True) -> None:
        """A rank joins. `before`: what it gets before its weights."""
        Following(self.desired, [*before, self.weights]).join(rank, lambda: is_wanted)

    @property
    def activity(self) -> Activity:
        return self.desired.now.activity

    def kill(self, rank: FakeRank) -> None:
        """A rank is lost."""
        rank.is_dead = True
        if self.ranks.get(rank.dp_rank) is rank:
            del self.ranks[rank.dp_rank]
            self.in_service.discard(rank.dp_rank)

    def check(self) -> None:
        """No rank serves with other weights than those that its outputs name."""
        latest = self.weights.latest
        for dp_rank in self.in_service:
            rank = self.ranks[dp_rank]
            assert (rank.weights.number, rank.weights.is_stale, rank.is_open) == (latest.version.number, False, False)
            assert rank.has != "half"
            assert latest.path in (None, rank.has)
            assert rank.known_by == (latest.path or latest.key)
            assert tuple(rank.told[:2]) == tuple(latest.version) or not rank.told
        assert len({self.ranks[dp_rank].has for dp_rank in self.in_service}) <= 1
        assert not self.activity.is_paused

    # ---- the manager, the supervisor, the clients and the pauses

    def use_checkpoint(self, path: str) -> None:
        self.path = path

    def wait(self, timeout_s: float) -> EngineDeadError | None:
        return None

    def watches(self) -> dict[int, Any]:
        return {dp_rank: SimpleNamespace(has_given_up=dp_rank in self.given_up) for dp_rank in self.ranks}

    def report(self, dp_rank: int, reason: str) -> None:
        self.log.append(("report", dp_rank))
        if dp_rank in self.ranks:
            self.kill(self.ranks[dp_rank])

    def on_rank_event(self, event: RankUp) -> None:
        self.in_service.add(event.dp_rank)

    def ranks_leaving(self, dp_ranks: Sequence[int], timeout_s: float, come_back: bool = False) -> None:
        assert come_back, "clients would refuse requests for them"
        self.in_service.difference_update(dp_ranks)

    def hold(self, call: str) -> None:
        self.desired.change(activity=self.activity.paused())

    def release(self) -> None:
        self.desired.change(activity=RUNNING)


def _wait(refs: Sequence[Future[Any]], num_returns: int, timeout_s: float) -> tuple[list[Any], list[Any]]:
    done, rest = futures.wait(refs, timeout_s)
    return list(done), list(rest)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_futures(monkeypatch)
    monkeypatch.setattr(weight_updates, "check_checkpoint", lambda path, config: None)
    monkeypatch.setattr(Engine, "all", [])
    yield
    for engine in Engine.all:  # otherwise a timer gives an update up after its test
        engine.has_ended = True
        engine.updates.stop()


@pytest.fixture
def engine() -> Engine:
    return Engine()


def failed(text: str = "RuntimeError: the trainer is gone") -> WorkerFailed:
    return WorkerFailed(0, text, "traceback")


def update(engine: Engine, info: str, name: str | None = None) -> None:
    engine.updates.start()
    engine.updates.update(info)
    engine.updates.finish(name)


def test_an_update_reaches_all_ranks_and_they_say_its_version(engine: Engine) -> None:
    assert engine.updates.version == "default"
    update(engine, "A", "v1")
    assert [rank.has for rank in engine.ranks.values()] == ["A", "A"]
    assert [rank.told for rank in engine.ranks.values()] == [(1, "v1", True)] * 2
    assert engine.updates.version == "v1"
    assert engine.weights.latest.path is None
    engine.check()
    update(engine, "B")
    assert engine.ranks[0].told == (2, "v1", True), "the name stays, as in vLLM"
    engine.check()


def test_an_update_begins_while_no_group_of_ranks_changes(engine: Engine) -> None:
    seen: list[bool] = []

    @contextmanager
    def changing() -> Iterator[None]:
        seen.append(engine.desired.now.is_updating)
        yield
        seen.append(engine.desired.now.is_updating)

    engine.desired.together = changing  # type: ignore[method-assign]
    engine.updates.start()
    assert seen == [False, True]


def test_what_is_computed_with_trained_weights_is_known_by_another_key_after_each_update(engine: Engine) -> None:
    keys: list[set[str]] = []
    for _ in range(3):
        update(engine, "A", "the same name")
        keys.append({rank.known_by for rank in engine.ranks.values()})
    assert [len(each) for each in keys] == [1, 1, 1]
    assert len(set.union(*keys)) == 3


def test_a_name_alone_changes_nothing_else(engine: Engine) -> None:
    engine.updates.rename("better")
    assert engine.updates.version == "better"
    assert [rank.told for rank in engine.ranks.values()] == [(0, "better", False)] * 2
    assert engine.add(2).told == (0, "better", True)
    with pytest.raises(InvalidInput, match="weight_version=7 isn't a non-empty string"):
        engine.updates.rename(7)
    engine.check()


@pytest.mark.parametrize("call", [lambda u: u.update("A"), lambda u: u.finish()])
def test_phases_out_of_order_are_refused(engine: Engine, call: Callable[[WeightUpdates], None]) -> None:
    with pytest.raises(InvalidInput, match=r"call start_weight_update\(\) first"):
        call(engine.updates)
    engine.updates.start()
    for second in (engine.updates.start, lambda: engine.updates.reload(OTHER)):
        with pytest.raises(InvalidInput, match="finish or cancel it first"):
            second()
    with pytest.raises(InvalidInput, match="finish or cancel it first"):
        engine.updates.transfer_engine("init_weight_transfer_engine", {})
    engine.updates.cancel()
    engine.updates.cancel()
    engine.check()


def test_invalid_tensors_change_nothing_and_the_update_goes_on(engine: Engine) -> None:
    engine.updates.start()
    with pytest.raises(InvalidInput, match=r"update_weights\(\): the model has no tensor 'unknown'"):
        engine.updates.update("unknown")
    engine.updates.update("A")
    engine.updates.finish("v1")
    assert [rank.has for rank in engine.ranks.values()] == ["A", "A"]
    engine.check()


@pytest.mark.parametrize("is_lockstep", [False, True])
def test_invalid_tensors_change_nothing_also_if_a_rank_is_lost_meanwhile(is_lockstep: bool) -> None:
    engine = Engine(can_copy=not is_lockstep)
    engine.is_lockstep = is_lockstep
    engine.updates.start()
    engine.kill(engine.ranks[1])
    if is_lockstep:  # which are replaced together
        with pytest.raises(RaycoreError, match="all ranks were lost"):
            engine.updates.update("unknown")
        assert not engine.desired.now.is_updating
        return
    with pytest.raises(InvalidInput, match=r"update_weights\(\): the model has no tensor 'unknown'"):
        engine.updates.update("unknown")
    engine.updates.update("A")
    engine.updates.finish("v1")
    assert engine.ranks[0].has == "A"
    engine.check()


def test_each_rank_gets_its_own_part_of_a_list(engine: Engine) -> None:
    engine.updates.start()
    with pytest.raises(InvalidInput, match="update_info has 3 entries for 4 workers"):
        engine.updates.update([{}, {}, {}])
    engine.updates.update(["a", "b", "c", "d"])
    assert [rank.brought for rank in engine.ranks.values()] == [["a", "b"], ["c", "d"]]
    engine.updates.cancel()


@pytest.mark.parametrize("method", ["start_weight_update", "update_weights", "finish_weight_update"])
@pytest.mark.parametrize(
    "error", [RayActorError(), failed(), InvalidInput("no such file here"), RpcTimeout("late"), TimeoutError()]
)
def test_a_rank_that_cannot_follow_is_left_behind_and_the_others_go_on(method: str, error: Exception) -> None:
    engine = Engine(timeout_s=1.0 if type(error) is TimeoutError else LONG_S)
    engine.updates._keep = lambda update: None  # type: ignore[method-assign]  # calls may come as late as they like
    engine.ranks[1].fails[method] = error
    update(engine, "A", "v1")
    assert engine.ranks[0].has == "A"
    assert engine.in_service == {0}, "no other rank can give it the weights"
    engine.check()
    if type(error) is TimeoutError:
        assert engine.log == [("report", 1)]
    elif not isinstance(error, RayActorError):
        assert [dp_rank for dp_rank, _ in engine.stale] == [1]
        update(engine, "B", "v2")
        assert engine.in_service == {0, 1}, "the next update brings all weights"
    engine.check()


@pytest.mark.parametrize("method", ["update_weights", "finish_weight_update"])
def test_an_update_that_fails_everywhere_ends_and_the_checkpoint_is_read_again(engine: Engine, method: str) -> None:
    for rank in engine.ranks.values():
        rank.fails[method] = failed()
    with pytest.raises(RaycoreError, match=r"dp_rank 0: .*the trainer is gone"):
        update(engine, "A", "v1")
    assert [rank.has for rank in engine.ranks.values()] == [BASE, BASE]
    assert engine.updates.version == "default"
    assert engine.in_service == {0, 1}
    engine.check()


def test_if_all_ranks_are_lost_the_update_ends_and_their_replacements_serve_the_old_weights(engine: Engine) -> None:
    engine.updates.start()
    for rank in list(engine.ranks.values()):
        engine.kill(rank)
    with pytest.raises(RaycoreError, match="all ranks were lost"):
        engine.updates.update("A")
    assert not engine.desired.now.is_updating
    engine.add(0)
    assert engine.in_service == {0}
    engine.check()


def started(begin: Callable[[], object]) -> threading.Thread:
    """A call that waits."""
    thread = threading.Thread(target=begin)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    return thread


@pytest.mark.parametrize("are_noticed", [True, False])
@pytest.mark.parametrize("reloads", [True, False])
def test_an_update_begins_when_a_rank_is_there_again(are_noticed: bool, reloads: bool) -> None:
    engine = Engine(can_copy=True)
    for rank in list(engine.ranks.values()):
        rank.is_dead = True
        if are_noticed:
            engine.kill(rank)
    call = started(lambda: engine.updates.reload(OTHER, "other") if reloads else engine.updates.start())
    assert not engine.activity.is_paused
    engine.add(0)
    call.join(LONG_S)
    assert not call.is_alive()
    if not reloads:
        engine.updates.update("A")
        engine.updates.finish("v1")
    assert engine.ranks[0].has == (OTHER if reloads else "A")
    if are_noticed:
        engine.add(1)
        assert engine.in_service == {0, 1}
        engine.check()


def losses() -> list[Exception]:
    return [RayActorError(), WorkerDied(0, 7, "node", "killed"), EngineDeadError("it was killed")]


@pytest.mark.parametrize("loss", losses(), ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("reloads", [True, False])
def test_an_update_begins_again_if_its_ranks_end_at_its_beginning(loss: Exception, reloads: bool) -> None:
    engine = Engine(can_copy=True)
    for rank in engine.ranks.values():
        rank.fails["reload_from" if reloads else "start_weight_update"] = loss
    call = started(lambda: engine.updates.reload(OTHER, "other") if reloads else engine.updates.start())
    engine.add(0)
    call.join(LONG_S)
    assert not call.is_alive()
    assert engine.updates.version == ("other" if reloads else "default")
    if not reloads:
        engine.updates.cancel()
    assert engine.in_service == {0}
    engine.check()


@pytest.mark.parametrize("loss", losses(), ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("method", ["update_weights", "finish_weight_update"])
def test_a_rank_that_ends_leaves_the_update_to_the_others_but_not_if_they_share_experts(
    loss: Exception, method: str
) -> None:
    for is_lockstep in (False, True):
        engine = Engine(can_copy=not is_lockstep)
        engine.is_lockstep = is_lockstep
        engine.ranks[1].fails[method] = loss
        if is_lockstep:
            with pytest.raises(RaycoreError, match="all ranks were lost"):
                update(engine, "A", "v1")
            assert engine.updates.version == "default", "those that are to replace all ranks couldn't get these weights"
        else:
            update(engine, "A", "v1")
            engine.add(1)
        assert {rank.has for rank in engine.ranks.values()} == {BASE if is_lockstep else "A"}
        assert engine.stale == []
        engine.check()


def test_an_update_waits_for_all_ranks_if_they_get_no_weights_from_each_other() -> None:
    for can_copy in (True, False):
        engine = Engine(can_copy=can_copy)
        late = FakeRank(engine, 1)
        engine.ranks[1] = late
        if can_copy:
            engine.updates.start()
            continue
        call = started(engine.updates.start)
        engine.join(late)
        call.join(LONG_S)
        assert late.is_open
        engine.updates.cancel()
        engine.ranks[1] = FakeRank(engine, 1)
        engine.given_up.add(1)
        engine.updates.start()


def test_an_update_waits_for_ranks_only_so_long() -> None:
    engine = Engine(timeout_s=0.2)
    for rank in list(engine.ranks.values()):
        engine.kill(rank)
    with pytest.raises(RaycoreError, match=r"start_weight_update\(\): all ranks were lost"):
        engine.updates.start()
    assert not engine.activity.is_paused


def test_a_cancelled_update_that_has_changed_nothing_reads_nothing(engine: Engine) -> None:
    engine.updates.start()
    engine.updates.cancel()
    assert all("reload_from" not in rank.asked for rank in engine.ranks.values())
    engine.check()


def test_a_cancelled_update_that_has_changed_weights_reads_the_checkpoint_they_came_from(engine: Engine) -> None:
    engine.updates.reload(OTHER, "other")
    engine.updates.start()
    engine.updates.update("A")
    engine.updates.cancel()
    assert [rank.has for rank in engine.ranks.values()] == [OTHER, OTHER]
    assert engine.updates.version == "other"
    engine.check()


def test_a_cancelled_update_of_weights_without_a_checkpoint_takes_ranks_out_of_service(engine: Engine) -> None:
    update(engine, "A", "v1")
    engine.updates.start()
    engine.updates.update("B")
    engine.updates.cancel()
    assert engine.in_service == set()
    assert [dp_rank for dp_rank, _ in engine.stale] == [0, 1]
    assert "no checkpoint" in engine.stale[0][1]
    update(engine, "C", "v2")
    assert engine.in_service == {0, 1}
    engine.check()


def test_a_trainer_that_goes_away_cancels_its_update_after_a_while() -> None:
    engine = Engine()
    engine.updates.start()
    engine.updates.update("A")
    assert engine.updates._update is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.updates, "_timeout_s", 0.01)
        engine.updates._keep(engine.updates._update)  # only now, so that the calls above may take long
    eventually(lambda: not engine.desired.now.is_updating)
    with pytest.raises(InvalidInput, match=r"call start_weight_update\(\) first"):
        engine.updates.finish("v1")
    assert [rank.has for rank in engine.ranks.values()] == [BASE, BASE]
    engine.check()


def test_a_timer_that_a_call_has_stopped_too_late_gives_no_update_up(engine: Engine) -> None:
    engine.updates.start()
    (timer,) = timers()
    engine.updates.update("A")
    timer.function(*timer.args, **timer.kwargs)  # it had fired when the call began
    assert engine.desired.now.is_updating
    engine.updates.finish("v1")
    engine.check()


def test_an_update_that_the_end_of_the_engine_interrupts_leaves_no_thread(engine: Engine) -> None:
    engine.updates.start()
    (timer,) = timers()
    engine.has_ended = True
    engine.updates.stop()
    timer.join(LONG_S / 2)
    assert not timer.is_alive()


def test_an_update_that_the_end_of_the_engine_overtakes_leaves_no_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(threading.Timer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            engine.has_ended = True
            engine.updates.stop()

    monkeypatch.setattr(weight_updates, "threading", SimpleNamespace(Timer=Late))
    with pytest.raises(EngineDeadError):
        engine.updates.start()
    assert not timers()


def timers() -> list[threading.Timer]:
    """Those that wait."""
    running = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    return [each for each in running if not each.finished.is_set()]


def test_a_checkpoint_is_taken_by_all_ranks_and_by_those_that_join_later(engine: Engine) -> None:
    engine.updates.reload(OTHER, "other")
    assert [rank.has for rank in engine.ranks.values()] == [OTHER, OTHER]
    assert engine.path == OTHER, "new processes read it"
    late = engine.add(2)
    assert late.asked == ["take_weights"]
    standby = engine.add(3, BASE)
    assert standby.asked == ["reload_from", "take_weights"]
    engine.check()
    engine.gone.add(OTHER)
    broken = engine.add(4, BASE)
    assert broken.weights.is_stale
    assert "/other isn't there" in engine.stale[0][1]
    engine.check()


def test_calls_on_a_model_whose_weights_stay_reach_no_rank(engine: Engine) -> None:
    engine.spec.why_weights_stay = "weights of a model that pools can't be replaced"
    for call in (engine.updates.start, lambda: engine.updates.reload(None)):
        with pytest.raises(InvalidInput, match="can't be replaced"):
            call()
    assert [rank.asked for rank in engine.ranks.values()] == [[], []]
    assert engine.in_service == {0, 1}
    engine.check()


def test_a_checkpoint_that_no_rank_can_read_leaves_the_old_weights(engine: Engine) -> None:
    engine.gone.add(OTHER)
    with pytest.raises(InvalidInput, match=r"reload_from\(\): /other isn't there"):
        engine.updates.reload(OTHER, "other")
    assert [rank.has for rank in engine.ranks.values()] == [BASE, BASE]
    assert (engine.updates.version, engine.path) == ("default", BASE)
    engine.check()


@pytest.mark.parametrize("has_path", [True, False])
def test_a_damaged_checkpoint_leaves_no_rank_with_weights_of_two_versions(engine: Engine, has_path: bool) -> None:
    if not has_path:
        update(engine, "A", "v1")
    for rank in engine.ranks.values():
        rank.fails["reload_from"] = Damaged("it ends too early")
    with pytest.raises(InvalidInput, match="ends too early"):
        engine.updates.reload(OTHER, "other")
    assert engine.in_service == ({0, 1} if has_path else set())
    assert has_path == all(rank.has == BASE for rank in engine.ranks.values())
    engine.check()


def test_a_checkpoint_that_is_refused_leaves_weights_that_are_in_no_file(engine: Engine) -> None:
    update(engine, "A", "v1")
    engine.gone.add(OTHER)
    with pytest.raises(InvalidInput, match="isn't there"):
        engine.updates.reload(OTHER, "other")
    assert [rank.has for rank in engine.ranks.values()] == ["A", "A"]
    assert engine.in_service == {0, 1}
    engine.check()


def test_a_checkpoint_that_one_rank_cannot_read_is_taken_by_the_others(engine: Engine) -> None:
    engine.ranks[0].fails["reload_from"] = failed()
    engine.updates.reload(OTHER, "other")
    assert [rank.has for rank in engine.ranks.values()] == [OTHER, OTHER], "it is read once more on that rank"
    engine.check()


def test_without_a_path_the_latest_checkpoint_is_read_again(engine: Engine) -> None:
    engine.updates.reload(OTHER, "other")
    update(engine, "A", "v1")
    engine.updates.reload(None)
    assert [rank.has for rank in engine.ranks.values()] == [OTHER, OTHER]
    engine.check()


def test_a_rank_that_joins_after_an_update_without_a_checkpoint_is_stale(engine: Engine) -> None:
    update(engine, "A", "v1")
    rank = engine.add(2)
    assert rank.weights.is_stale
    assert engine.in_service == {0, 1}
    assert engine.stale == [(2, "they came from no checkpoint, and no other rank can give them")]
    update(engine, "B", "v2")
    assert engine.in_service == {0, 1, 2}
    engine.check()


def test_a_rank_that_joins_during_an_update_waits_for_its_end(engine: Engine) -> None:
    engine.updates.start()
    joining = threading.Thread(target=engine.add, args=(2,))
    joining.start()
    engine.updates.update("A")
    joining.join(0.1)
    assert joining.is_alive()
    assert "start_weight_update" not in engine.ranks[2].asked
    engine.updates.cancel()
    joining.join(LONG_S)
    assert engine.in_service == {0, 1, 2}
    engine.check()


def test_a_rank_that_is_not_wanted_any_more_does_not_wait(engine: Engine) -> None:
    engine.updates.start()
    with pytest.raises(InitializationError, match="shut down"):
        engine.join(FakeRank(engine, 2), is_wanted=False)


def test_a_rank_that_gets_weights_while_an_update_begins_gets_them_again(engine: Engine) -> None:
    engine.updates.reload(OTHER, "other")
    rank = FakeRank(engine, 2, BASE)
    engine.ranks[2] = rank
    reload_from = rank._reload_from

    def slow(path: str) -> list[None]:
        rank._reload_from = reload_from  # type: ignore[method-assign]
        engine.updates.reload(BASE, "base")
        return reload_from(path)

    rank._reload_from = slow  # type: ignore[method-assign]
    engine.join(rank)
    engine.weights.announce(engine, [rank])  # type: ignore[arg-type]
    assert rank.has == BASE
    engine.check()


def test_a_rank_that_copies_weights_during_an_update_that_is_given_up_does_not_serve_with_them() -> None:
    """What it has copied is neither what was before nor what comes."""
    engine = Engine(1, can_copy=True)
    update(engine, "A", "v1")
    donor, rank = engine.ranks[0], FakeRank(engine, 1)
    engine.ranks[1] = rank
    export = donor._export_weights

    def slow() -> list[Any]:
        donor._export_weights = export  # type: ignore[method-assign]
        engine.updates.start()
        engine.updates.update("B")
        copied = export()
        engine.updates.cancel()
        return copied

    donor._export_weights = slow  # type: ignore[method-assign]
    engine.join(rank)
    engine.weights.announce(engine, [rank])  # type: ignore[arg-type]
    assert rank.weights.is_stale
    assert engine.in_service == set()
    update(engine, "C", "v2")
    assert engine.in_service == {0, 1}
    engine.check()


def test_a_rank_that_joins_while_weights_are_asleep_gets_them_when_they_wake_up(engine: Engine) -> None:
    engine.updates.reload(OTHER, "other")
    rank = engine.ranks[2] = FakeRank(engine, 2, BASE)
    engine.desired.change(activity=RUNNING.put_to_sleep(1))
    engine.join(rank)
    assert rank.asked == []
    engine.desired.change(activity=RUNNING)
    engine.on_woken(were_dropped=False, are_read=True)
    assert rank.has == OTHER
    assert engine.in_service == {0, 1, 2}
    engine.check()


def test_after_a_deep_sleep_weights_without_a_checkpoint_are_those_of_the_latest_one(engine: Engine) -> None:
    update(engine, "A", "v1")
    for rank in engine.ranks.values():
        rank.has = rank.known_by = BASE  # as `load_model()` does
    engine.on_woken(were_dropped=True, are_read=True)
    assert engine.updates.version == "default"
    assert engine.ranks[0].told == (2, "default", True)
    engine.check()


def test_after_a_deep_sleep_ranks_get_the_checkpoint_that_they_had_before(engine: Engine) -> None:
    engine.updates.reload(OTHER, "other")
    late = engine.add(2)
    for rank in engine.ranks.values():
        rank.has = rank.known_by = rank.weights.config_path or ""  # as `load_model()` does
        rank.asked.clear()
    engine.on_woken(were_dropped=True, are_read=True)
    assert [rank.has for rank in engine.ranks.values()] == [OTHER] * 3
    assert "reload_from" in engine.ranks[0].asked
    assert "reload_from" not in late.asked, "its configuration has that checkpoint"
    assert engine.updates.version == "other"
    engine.check()


def test_a_name_that_is_given_while_weights_come_back_from_a_deep_sleep_stays(engine: Engine) -> None:
    engine.updates.reload("P", "before")
    last, read = engine.ranks[1], engine.ranks[1]._reload_from

    def renamed(path: str) -> list[None]:
        engine.updates.rename("after")
        return read(path)

    last._reload_from = renamed  # type: ignore[method-assign]
    engine.on_woken(were_dropped=True, are_read=True)
    assert [rank.told[:2] for rank in engine.ranks.values()] == [(1, "after")] * 2
    engine.check()


def test_ranks_have_to_make_progress_while_they_get_weights_after_a_deep_sleep(engine: Engine) -> None:
    found: list[bool] = []
    for rank in engine.ranks.values():
        rank._take_weights = lambda *version: found.append(engine.desired.is_changing)  # type: ignore[method-assign]
    engine.updates.reload(OTHER, "other")
    found.clear()
    engine.on_woken(were_dropped=True, are_read=True)
    assert found == [True, True]
    assert not engine.desired.is_changing


class WakesUp(DesiredPart):
    """The engine, which is asleep, wakes up while a rank joins."""

    def __init__(self, engine: Engine, wake_up: Callable[[], object]) -> None:
        self._engine, self._wake_up = engine, wake_up
        engine.desired.change(activity=RUNNING.put_to_sleep(1))

    def bring(self, rank: Rank, desired: Desired, is_wanted: Callable[[], bool]) -> None:
        if desired.activity.asleep and self._engine.activity.asleep:
            self._engine.desired.change(activity=RUNNING)
            self._wake_up()


def wake_up_without_weights(engine: Engine) -> None:
    for rank in engine.ranks.values():
        rank.has = "nothing"
    engine.on_woken(were_dropped=True, are_read=False)


@pytest.mark.parametrize("can_copy", [False, True])
def test_after_a_wake_up_that_reads_no_weights_nobody_serves_until_an_update_brings_all(can_copy: bool) -> None:
    engine = Engine(can_copy=can_copy)
    wake_up_without_weights(engine)
    assert engine.in_service == set()
    late = engine.add(2)
    assert late.has == BASE, "it has read its checkpoint"
    assert engine.in_service == set(), "which isn't what the caller wants"
    assert engine.stale == [], "this is no failure"
    assert engine.updates.stale_ranks() == [*engine.ranks.values()]
    engine.updates.start()
    assert [rank.needs_all for rank in engine.ranks.values()] == [True] * 3
    with pytest.raises(InvalidInput, match="the update lacks 7 tensors"):
        engine.updates.finish("v1")
    assert engine.in_service == set()
    engine.updates.update("A")
    engine.updates.finish("v1")
    assert [rank.told for rank in engine.ranks.values()] == [(2, "v1", True)] * 3
    assert engine.in_service == {0, 1, 2}
    engine.check()


def test_a_whole_update_that_is_given_up_leaves_an_engine_without_weights_as_it_was() -> None:
    engine = Engine(can_copy=True)
    wake_up_without_weights(engine)
    engine.updates.rename("later")
    engine.updates.start()
    engine.updates.update("A")
    engine.updates.cancel()
    assert engine.in_service == set()
    assert engine.add(1).weights.is_stale
    engine.updates.reload(None)
    assert [rank.has for rank in engine.ranks.values()] == [BASE, BASE]
    assert engine.in_service == {0, 1}
    assert engine.updates.version == "later"
    engine.check()


def test_a_rank_that_joins_while_the_engine_wakes_up_without_weights_does_not_serve_with_those_it_has_read() -> None:
    engine = Engine()
    late = engine.ranks[2] = FakeRank(engine, 2)
    engine.join(late, WakesUp(engine, lambda: wake_up_without_weights(engine)))
    engine.weights.announce(engine, [late])  # type: ignore[arg-type]
    assert late.weights.is_stale
    assert engine.in_service == set()


def test_a_rank_that_joins_while_the_engine_wakes_up_gets_the_weights(engine: Engine) -> None:
    engine.updates.reload(OTHER, "other")
    late = engine.ranks[2] = FakeRank(engine, 2)
    engine.join(late, WakesUp(engine, lambda: engine.on_woken(were_dropped=False, are_read=True)))
    engine.weights.announce(engine, [late])  # type: ignore[arg-type]
    assert late.has == OTHER
    assert engine.in_service == {0, 1, 2}
    engine.check()


def test_a_wake_up_without_weights_needs_a_model_whose_weights_can_change(engine: Engine) -> None:
    engine.spec.why_weights_stay = "the weights of models that pool can't be changed"
    with pytest.raises(InvalidInput, match=r"wake_up\(reads_weights=False\): the weights of models that pool"):
        engine.updates.check_can_change("wake_up(reads_weights=False)")


@pytest.mark.parametrize("method", ["start_weight_update", "update_weights", "finish_weight_update"])
@pytest.mark.parametrize("error", [failed(), InvalidInput("no such file here")])
def test_ranks_that_share_experts_follow_an_update_together_or_not_at_all(
    engine: Engine, method: str, error: Exception
) -> None:
    engine.is_lockstep = True
    engine.ranks[1].fails[method] = error
    with pytest.raises(RaycoreError) as caught:
        update(engine, "A", "v1")
    assert not isinstance(caught.value, InvalidInput), "that would say that the update goes on"
    assert [rank.has for rank in engine.ranks.values()] == [BASE, BASE]
    assert engine.in_service == {0, 1}
    assert engine.updates.version == "default"
    engine.check()

    update(engine, "A", "v1")
    engine.ranks[1].fails[method] = error
    with pytest.raises(RaycoreError):
        update(engine, "B", "v2")
    if method != "start_weight_update":
        assert engine.in_service == set(), "no rank has all of the old experts, nor all of the new ones"
    update(engine, "C", "v3")
    assert [rank.has for rank in engine.ranks.values()] == ["C", "C"]
    assert engine.in_service == {0, 1}
    engine.check()


def test_a_rank_that_shares_experts_does_not_serve_while_another_is_stale(engine: Engine) -> None:
    engine.is_lockstep = True
    update(engine, "A", "v1")
    engine.updates.start()
    engine.ranks[0].brought, engine.ranks[0].has = "B", "half"
    engine.updates.cancel()
    assert engine.in_service == set()


def test_calls_of_an_engine_that_has_ended_say_so(engine: Engine) -> None:
    engine.updates.start()
    engine.has_ended = True
    with pytest.raises(EngineDeadError):
        engine.updates.update("A")


def test_a_rank_that_joins_gets_weights_without_a_checkpoint_from_another_rank() -> None:
    engine = Engine(can_copy=True)
    update(engine, "A", "v1")
    engine.ranks[0].fails["export_weights"] = failed("MemoryError: no room")
    rank = engine.add(2)
    assert rank.has == "A"
    assert rank.told[:2] == (1, "v1")
    assert engine.in_service == {0, 1, 2}
    assert [each.num_exported for each in engine.ranks.values()] == [0, 0, 0]
    engine.check()


@pytest.mark.parametrize("method", ["export_weights", "import_weights"])
def test_a_rank_that_can_get_weights_from_no_other_is_stale(method: str) -> None:
    engine = Engine(can_copy=True)
    update(engine, "A", "v1")
    rank = FakeRank(engine, 2)
    for each in (*engine.ranks.values(), rank):
        each.fails[method] = failed("MemoryError: no room")
        each.keeps_failing = True
    engine.ranks[2] = rank
    engine.join(rank)
    engine.weights.announce(engine, [rank])  # type: ignore[arg-type]
    assert rank.weights.is_stale
    assert [each.num_exported for each in engine.ranks.values()] == [0, 0, 0]
    engine.check()


def test_a_rank_on_which_an_update_fails_gets_the_weights_from_another_before_the_engine_continues() -> None:
    engine = Engine(can_copy=True)
    engine.ranks[1].fails["update_weights"] = failed()
    update(engine, "A", "v1")
    assert [rank.has for rank in engine.ranks.values()] == ["A", "A"]
    assert engine.in_service == {0, 1}
    assert engine.stale == []
    engine.check()


@pytest.mark.parametrize("can_copy", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_whatever_fails_no_rank_serves_weights_of_two_versions(seed: int, can_copy: bool) -> None:
    chance = random.Random(seed)
    engine = Engine(3, can_copy=can_copy)
    errors = [failed, lambda: InvalidInput("not here"), lambda: Damaged("cut off"), RayActorError]
    for step in range(30):
        for rank in list(engine.ranks.values()):
            if chance.random() < 0.3:
                method = chance.choice(
                    [
                        *("start_weight_update", "update_weights", "finish_weight_update", "reload_from"),
                        *("take_weights", "export_weights", "import_weights"),
                    ]
                )
                rank.fails = {method: chance.choice(errors)()}
        try:
            if chance.random() < 0.3:
                engine.updates.reload(chance.choice([BASE, OTHER, None]), f"v{step}")
            else:
                engine.updates.start()
                for _ in range(chance.randrange(3)):
                    engine.updates.update(chance.choice([f"weights {step}", "unknown"]))
                if chance.random() < 0.2:
                    engine.updates.cancel()
                else:
                    engine.updates.finish(f"v{step}")
        except RaycoreError:
            engine.updates.cancel()
        engine.check()
        for dp_rank in range(3):
            if dp_rank not in engine.ranks:
                engine.add(dp_rank, chance.choice([engine.path, BASE]))
        engine.check()
