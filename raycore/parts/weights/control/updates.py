"""Updates the weights of a running engine, on all its ranks.

An update has phases: it begins, brings tensors in any number of calls, and ends. The engine is paused meanwhile, so no
step has weights of two versions. Each phase is a call to all ranks. What happens to ranks that can't follow:

- An update begins when a rank is there: those that are being replaced are waited for if there is no other.
- A rank that is lost is replaced, and gets the engine's weights when the update has ended (`parts/weights/cluster.py`).
- A rank on which a call fails leaves the update. At the end, it gets the weights from elsewhere, or is stale.
- If no rank can go on, the update is given up: it is as if `cancel()` were called. If ranks share experts, none can go
  on without the others, whose experts it computes with.

`EngineCalls` documents the calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from raycore.checkpoint.gguf.header import is_gguf
from raycore.checkpoint.model_spec import load_model_spec
from raycore.checkpoint.stored_model import fit_model
from raycore.checkpoint.weight_files import has_weight_files, stored_tensors
from raycore.client.group import ClientGroup
from raycore.cluster.desired import DesiredWeights
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.rank import Rank
from raycore.cluster.supervisor import Supervisor
from raycore.config import EngineConfig
from raycore.control.pauses import Pauses
from raycore.control.replies import Replies, ask_ranks, check_running
from raycore.errors import EngineDeadError, InvalidCheckpoint, InvalidInput, RaycoreError, RpcTimeout, WorkerDied
from raycore.json_fields import shortened
from raycore.messages import WeightVersion
from raycore.parts.transfers.connectors.identity import unique_key
from raycore.parts.weights.transfer.references import lent
from raycore.system import threading, time

logger = logging.getLogger(__name__)


_LOSSES = (WorkerDied, EngineDeadError)
"""What a rank raises that is ending."""


class _AllRanksLost(RaycoreError):
    """No rank is left in an update."""


@dataclass
class _Update:
    """An update under way."""

    ranks: list[Rank]
    """Those that have followed each call."""
    behind: list[Rank] = field(default_factory=list[Rank])
    """Those on which a call failed. What weights they have isn't known."""
    timer: threading.Timer | None = None
    """Gives the update up if the next call doesn't come."""


class WeightUpdates:
    """The updates of one engine. Thread-safe: calls wait for each other."""

    def __init__(
        self,
        manager: CoreEngineActorManager,
        supervisor: Supervisor,
        clients: ClientGroup,
        pauses: Pauses,
        config: EngineConfig,
    ) -> None:
        self._manager = manager
        self._desired = manager.desired
        self._weights = manager.weights
        self._supervisor = supervisor
        self._clients = clients
        self._pauses = pauses
        self._config = config
        self._timeout_s = config.recovery.weight_update_timeout_s
        self._changing = threading.Lock()
        self._update: _Update | None = None
        pauses.on_woken = self._after_wake_up

    @property
    def version(self) -> str:
        """What the engine's weights are called."""
        return self._weights.latest.version.name

    def rename(self, name: object) -> None:
        """Call the weights something else."""
        with self._next_call():
            version = self._weights.rename(_checked_name("update_weight_version", name))
            self._ask(self._joined(), "take_weights", (*version, False))

    def transfer_engine(self, method: str, *args: Any) -> None:
        """Have all workers connect to a trainer, or disconnect."""
        with self._next_call():
            if self._update is not None:
                raise InvalidInput(f"{method}(): an update of weights is under way: finish or cancel it first")
            replies = self._ask(self._joined(), "update_weights", (method, args))
            for rank, error in replies.errors:
                raise _named(error, rank, method)
            for rank in replies.late:
                raise self._late(rank, method)

    def start(self) -> None:
        """Begin an update."""
        with self._next_call():
            if self._update is not None:
                raise InvalidInput("start_weight_update(): an update is under way: finish or cancel it first")
            self._with_ranks(self._start, is_from_files=False)

    def _start(self) -> None:
        update = self._open("start_weight_update")
        try:
            # a stale rank has to get all weights
            self._call(update, "start_weight_update", lambda rank: (True,) if rank.weights.is_stale else ())
        except BaseException:
            self._ask(update.behind, "update_weights", ("cancel_weight_update",))
            self._weights.keep(update.behind)
            self._end(update)
            raise

    def update(self, update_info: object) -> None:
        """Bring tensors. References to Ray's objects are valid in the workers as long as this call."""
        with self._next_call(), lent(update_info) as plain:
            update = self._begun("update_weights")
            per_rank = self._config.parallel.world_size
            if isinstance(plain, list):
                parts = cast("list[object]", plain)
                most = max(rank.dp_rank for rank in update.ranks) + 1
                if len(parts) < most * per_rank:
                    raise InvalidInput(
                        f"update_weights(): update_info has {len(parts)} entries for {most * per_rank} workers"
                    )

                def infos(rank: Rank) -> tuple[Any, ...]:
                    return (parts[rank.dp_rank * per_rank : (rank.dp_rank + 1) * per_rank],)

                self._call_or_give_up(update, "update_weights", infos)
            else:
                self._call_or_give_up(update, "update_weights", lambda rank: (plain,))

    def finish(self, name: object = None) -> None:
        """Apply what has come, and let the engine continue with it."""
        with self._next_call():
            update = self._begun("finish_weight_update")
            checked = self.version if name is None else _checked_name("finish_weight_update", name)
            self._call_or_give_up(update, "finish_weight_update")
            self._adopt(update, DesiredWeights(WeightVersion(self._next_number, checked), None, unique_key()))

    def cancel(self) -> None:
        """Give the update up, if there is one."""
        with self._next_call():
            if self._update is not None:
                self._give_up(self._update)

    def reload(self, path: str | None, name: object = None) -> None:
        """Take the weights of a checkpoint."""
        with self._next_call():
            if self._update is not None:
                raise InvalidInput("reload_weights(): an update is under way: finish or cancel it first")
            checked = self.version if name is None else _checked_name("reload_weights", name)
            path = str(Path(path).expanduser().absolute()) if path is not None else self._weights.stored.path
            assert path is not None, "the engine has started with a checkpoint"
            check_checkpoint(path, self._config)
            self._with_ranks(lambda: self._reload(path, checked), is_from_files=True)

    def _reload(self, path: str, name: str) -> None:
        update = self._open("reload_weights")
        ranks = update.ranks
        # if a file is damaged, the weights may have changed: they can be read again, unless no file has them
        before = self._checksums(ranks) if self._weights.latest.path is None else {}
        try:
            self._call(update, "reload_from", lambda rank: (path,))
        except BaseException:
            after = self._checksums(ranks) if before else {}
            unchanged = [rank for rank in ranks if rank in before and before[rank] == after.get(rank)]
            self._leave_behind(update, [rank for rank in ranks if rank not in unchanged])
            self._weights.keep(unchanged)
            self._end(update)
            raise
        self._manager.use_checkpoint(path)
        self._adopt(update, DesiredWeights(WeightVersion(self._next_number, name), path))

    # ---- begin and end

    @contextmanager
    def _next_call(self) -> Generator[None, None, None]:
        with self._changing:
            check_running(self._supervisor)
            if self._update is not None:
                self._stop_timer(self._update)
            try:
                yield
            finally:
                if self._update is not None and not self._supervisor.has_ended:
                    self._keep(self._update)
            check_running(self._supervisor)

    def _with_ranks(self, begin: Callable[[], None], *, is_from_files: bool) -> None:
        """Begin an update when there are ranks for it, and once more if they are all lost meanwhile."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            timeout_s = deadline_s - time.monotonic()
            self._weights.await_ranks(
                self._expected, timeout_s, lambda: not self._supervisor.has_ended, is_from_files=is_from_files
            )
            try:
                return begin()
            except _AllRanksLost:
                if time.monotonic() >= deadline_s or self._supervisor.has_ended:
                    raise

    def _expected(self) -> list[Rank]:
        """The ranks that are up, or are being replaced."""
        watches = self._supervisor.watches()
        return [
            rank
            for rank in list(self._manager.ranks.values())
            if rank.dp_rank not in watches or not watches[rank.dp_rank].has_given_up
        ]

    def stop(self) -> None:
        """Give no update up any more, because the engine has ended."""
        if self._update is not None:
            self._stop_timer(self._update)

    def check_can_change(self, call: str) -> None:
        """Raise InvalidInput if the weights of the model can't be changed."""
        if (reason := self._config.model.spec.why_weights_stay) is not None:
            raise InvalidInput(f"{call}: {reason}")

    def _open(self, call: str) -> _Update:
        self.check_can_change(f"{call}()")
        self._pauses.hold(f"{call}()")
        with self._desired.together():  # not while ranks that share experts move them
            update = _Update(self._weights.open())
        self._update = update
        return update

    def _begun(self, call: str) -> _Update:
        if self._update is None:
            raise InvalidInput(f"{call}(): no update of weights is under way: call start_weight_update() first")
        return self._update

    @property
    def _next_number(self) -> int:
        return self._weights.latest.version.number + 1

    def _adopt(self, update: _Update, latest: DesiredWeights) -> None:
        """End an update with other weights, which its ranks have."""
        self._weights.set(latest, update.ranks)
        replies = self._ask(update.ranks, "take_weights", (*latest.version, True, latest.key))
        self._weights.took(update.ranks)
        for rank, error in replies.errors:
            self._supervisor.report(rank.dp_rank, f"it can't take other weights: {error}")
        self._end(update)

    def _give_up(self, update: _Update) -> None:
        """End an update with the weights that were there before it."""
        replies = self._ask([*update.ranks, *update.behind], "update_weights", ("cancel_weight_update",))
        unchanged = [rank for rank, changes in replies.results if not any(changes) and rank not in update.behind]
        self._weights.forget(rank for rank in (*update.ranks, *update.behind) if rank not in unchanged)
        self._end(update)

    def _end(self, update: _Update) -> None:
        """Give ranks that haven't followed the engine's weights, and let the engine continue."""
        try:
            self._settle()
        finally:
            self._update = None
            self._stop_timer(update)
            self._weights.close()
        self._pauses.release()

    def _settle(self) -> None:
        """Have all ranks have the engine's weights. Those that can't are out of service."""
        ranks, desired = self._joined(), self._desired.now
        for rank in ranks:
            if rank.weights.number != desired.weights.version.number:
                self._ask([rank], "update_weights", ("cancel_weight_update",))
                self._weights.bring(rank, desired, lambda: not self._supervisor.has_ended)
        if self._weights.latest.version != desired.weights.version:  # a wake-up doesn't keep others from renaming them
            self._ask(ranks, "take_weights", (*self._weights.latest.version, False))
        if self._manager.is_lockstep and any(rank.weights.is_stale for rank in ranks):
            self._weights.make_stale(ranks)
        self._weights.withdraw(self._clients, [rank for rank in ranks if rank.weights.is_stale])
        self._weights.announce(self._clients, ranks)

    def stale_ranks(self) -> list[Rank]:
        """Those ranks that have no weights that they may serve with."""
        return [rank for rank in self._joined() if rank.weights.is_stale]

    def _joined(self) -> list[Rank]:
        return [rank for rank in list(self._manager.ranks.values()) if rank.has_joined]

    def _after_wake_up(self, *, were_dropped: bool, are_read: bool) -> None:
        """Ranks' weights have come back from a sleep: see `OnWoken`."""
        latest = self._weights.latest
        if were_dropped and not are_read:
            version = WeightVersion(latest.version.number + 1, latest.version.name)
            self._weights.set(DesiredWeights(version, None, is_missing=True), [])
        elif were_dropped and latest.path is None:
            stored = self._weights.stored
            logger.warning(
                "the weights of version %r are gone after sleep(level=2): these are those of %s, version %r",
                *(latest.version.name, stored.path, stored.version.name),
            )
            version = WeightVersion(latest.version.number + 1, stored.version.name)
            self._weights.set(DesiredWeights(version, stored.path), [])
        if were_dropped:
            self._weights.read_again(self._joined())
        self._weights.note_wake_up()
        with self._desired.asking():  # a rank that is stuck meanwhile is noticed
            self._settle()

    # ---- time

    def _keep(self, update: _Update) -> None:
        """Give the update up if the next call doesn't come in time."""
        self._stop_timer(update)
        update.timer = threading.Timer(self._timeout_s, self._on_silence, [update])
        update.timer.name, update.timer.daemon = "raycore-update-timeout", True
        update.timer.start()
        if self._supervisor.has_ended:  # `stop()` may have come just before
            self._stop_timer(update)

    def _stop_timer(self, update: _Update) -> None:
        if update.timer is not None:
            update.timer.cancel()

    def _on_silence(self, update: _Update) -> None:
        with self._changing:
            # a call may have begun, and have ended, while this thread waited for it
            is_stopped = update.timer is not threading.current_thread()
            if self._update is not update or is_stopped or self._supervisor.has_ended:
                return
            logger.error(
                "the update of weights is given up: its next call hasn't come within weight_update_timeout_s=%g",
                self._timeout_s,
            )
            self._give_up(update)

    # ---- calls to ranks

    def _call_or_give_up(
        self, update: _Update, method: str, arguments: Callable[[Rank], tuple[Any, ...]] = lambda rank: ()
    ) -> None:
        try:
            self._call(update, method, arguments)
        except BaseException:
            if not update.ranks:
                self._give_up(update)
            raise

    def _call(self, update: _Update, method: str, arguments: Callable[[Rank], tuple[Any, ...]]) -> None:
        """Call a method of all workers of an update's ranks. Ranks that can't follow leave it.

        Args:
            arguments: gives those for a rank.

        Raises:
            InvalidInput: an argument is invalid. No rank has changed anything, and the update goes on.
            RaycoreError: no rank could follow. The update has no rank any more.
        """
        ranks = update.ranks
        replies = self._ask_each(ranks, "update_weights", lambda rank: (method, arguments(rank), self._timeout_s))
        errors = [(rank, error) for rank, error in replies.errors if not isinstance(error, _LOSSES)]
        refused = [(rank, error) for rank, error in errors if isinstance(error, InvalidInput)]
        failed = [(rank, error) for rank, error in errors if not isinstance(error, InvalidInput)]
        failed += [(rank, self._late(rank, method)) for rank in replies.late]
        lost = {*ranks} - {rank for rank, _ in (*replies.results, *refused, *failed)}
        for rank in lost:
            rank.has_joined = False  # it has ended, and its replacement will join
        update.ranks = [rank for rank, _ in replies.results]
        self._leave_behind(update, [rank for rank, _ in failed])
        if self._manager.is_lockstep and len(update.ranks) < len(ranks):  # each computes with the experts of all
            self._leave_behind(update, update.ranks)
            update.ranks = []
        for rank, error in failed:
            logger.warning("dp_rank %d can't follow the update of weights: %s(): %s", rank.dp_rank, method, error)
        if update.ranks:
            self._leave_behind(update, [rank for rank, _ in refused])
        elif refused and len(refused) == len(ranks) - (0 if self._manager.is_lockstep else len(lost)):
            update.ranks = [rank for rank, _ in refused]
            raise _named(refused[0][1], refused[0][0], method)
        elif failed or (refused and not lost):
            self._leave_behind(update, [rank for rank, _ in refused])
            rank, error = (failed or refused)[0]  # if some have refused, others have followed: something has changed
            raise _failed(error, rank, method)
        else:
            self._leave_behind(update, [rank for rank, _ in refused])
            raise _AllRanksLost(f"{method}(): all ranks were lost, so the update of weights has ended")

    def _leave_behind(self, update: _Update, ranks: Sequence[Rank]) -> None:
        update.behind += ranks
        self._weights.forget(ranks)

    def _checksums(self, ranks: Sequence[Rank]) -> dict[Rank, object]:
        """The hashes of the weights of each rank's workers."""
        return dict(self._ask(ranks, "update_weights", ("weights_checksum",)).results)

    def _ask(self, ranks: Sequence[Rank], method: str, args: tuple[Any, ...]) -> Replies[Any]:
        return self._ask_each(ranks, method, lambda rank: args)

    def _ask_each(self, ranks: Sequence[Rank], method: str, args: Callable[[Rank], tuple[Any, ...]]) -> Replies[Any]:
        replies = ask_ranks(ranks, method, args, self._timeout_s, self._supervisor)
        for rank in replies.late:
            # its replacement gets the weights
            self._supervisor.report(rank.dp_rank, f"{method}() hasn't ended within {self._timeout_s:g} s")
        return replies

    def _late(self, rank: Rank, method: str) -> RpcTimeout:
        return RpcTimeout(
            f"dp_rank {rank.dp_rank} hasn't ended {method}() within weight_update_timeout_s={self._timeout_s:g}"
        )


def check_checkpoint(path: str, config: EngineConfig) -> None:
    """Check that a checkpoint has the weights of the engine's model.

    Raises:
        InvalidCheckpoint: the directory is missing or damaged, or has another model.
    """
    directory, before = Path(path), config.fitted().model
    if not has_weight_files(directory):
        stored_tensors(directory)  # raises the error that says what is missing
    spec = before.spec
    if spec.implementation != "raycore":
        return  # workers compare the tensors
    is_file = is_gguf(directory)
    is_described = is_file == is_gguf(Path(before.model)) and (is_file or (directory / "config.json").exists())
    if is_described and spec.pooling is None and spec.encoder is None:
        old, new = (msgspec.to_builtins(load_model_spec(each)) for each in (Path(before.model), directory))
        # fit_model() compares the types of a GGUF file's tensors, not all of which must be the same
        may_differ = ("eos_token_ids", "quantization", "dtype") if is_file else ("eos_token_ids",)
        for name in sorted(new, key=lambda name: isinstance(new[name], list | dict)):  # first what is easy to read
            if old[name] != new[name] and name not in may_differ:
                raise InvalidCheckpoint(
                    f"{path} has another model: its {name} is {shortened(new[name])}, and the engine's is "
                    f"{shortened(old[name])}"
                )
    fit_model(spec, directory)


def _checked_name(call: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"{call}(): weight_version={name!r} isn't a non-empty string")
    return name


def _named(error: BaseException, rank: Rank, method: str) -> BaseException:
    """The error of a rank, with what it concerns."""
    if isinstance(error, InvalidInput):
        kind = InvalidCheckpoint if isinstance(error, InvalidCheckpoint) else InvalidInput
        return kind(f"{method}(): {error}").with_traceback(None)
    return _failed(error, rank, method)


def _failed(error: BaseException, rank: Rank, method: str) -> RaycoreError:
    return RaycoreError(f"{method}(): dp_rank {rank.dp_rank}: {error}")
