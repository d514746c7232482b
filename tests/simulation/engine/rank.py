"""A rank: the real core, mailbox and loop, as the rank's actor has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from raycore.activity import Activity
from raycore.config import EngineConfig
from raycore.engine.core import EngineCore
from raycore.engine.decoding import decode_requests
from raycore.engine.loop import run_loop
from raycore.engine.mailbox import Abort, ForgetClient, Mailbox, SetActivity, StartWave, Submit, Utility
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.parts.experts.engine.lockstep import run_lockstep_loop
from raycore.parts.experts.engine.waves import Waves
from raycore.scheduler.outputs import StepOutputs
from raycore.scheduler.scheduler import Scheduler
from raycore.system import Future, threading
from raycore.worker.rank import RankIdentity
from simulation.engine.leftovers import leftovers
from simulation.worker.model import Shape

WAIT_S = 200.0
"""Virtual seconds that any call may take."""
_STEPS_PER_CHECK = 8


class Rank:
    """See the module. Any thread calls its methods."""

    def __init__(self, config: EngineConfig, dp_rank: int = 0, rendezvous: str | None = None) -> None:
        """`rendezvous`: where ranks that share experts meet. They have to be made at the same time."""
        self._config = config
        executor = InlineExecutor(config, RankIdentity(dp_rank, 1))
        self.core = EngineCore(config, executor, rendezvous, dp_rank=dp_rank)
        self.peers: list[Rank] = []
        """The other ranks that share experts."""
        self.mailbox = Mailbox()
        self.failure: BaseException | None = None
        """Why the loop has ended, if not by `stop`."""
        self.num_steps = 0
        spec = config.model.spec
        self.shape = Shape(spec.vocab_size, tuple(self.core.cache.layout.windows), spec.state is not None)
        self._step, self._lockstep_step = self.core.step, self.core.lockstep_step
        self.core.step, self.core.lockstep_step = self._checked_step, self._checked_lockstep_step
        self._thread = threading.Thread(target=self._run, name="raycore-loop")

    @property
    def scheduler(self) -> Scheduler:
        scheduler = self.core.scheduler
        assert isinstance(scheduler, Scheduler)
        return scheduler

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            if self.core.is_in_lockstep:
                waves = Waves(self._config.parallel.dp_sync_interval)
                run_lockstep_loop(self.core, self.mailbox, waves, self._tell_peers)
            else:
                run_loop(self.core, self.mailbox)
        except Exception as error:
            self.failure = error
        finally:
            self.mailbox.close()
        self.core.shutdown()

    def _tell_peers(self, wave: int) -> None:
        for peer in self.peers:
            peer.mailbox.put(StartWave(wave))

    def _checked_step(self) -> StepOutputs | None:
        outputs = self._step()
        self._check(outputs)
        return outputs

    def _checked_lockstep_step(self, **options: Any) -> tuple[StepOutputs | None, bool | None]:
        outputs, is_anyone_busy = self._lockstep_step(**options)
        self._check(outputs)
        return outputs, is_anyone_busy

    def _check(self, outputs: StepOutputs | None) -> None:
        self.num_steps += outputs is not None
        if self.num_steps % _STEPS_PER_CHECK == 0:
            self.scheduler.check_integrity()

    def submit(self, requests: list[EngineRequest]) -> None:
        """Add requests, as a client's message."""
        self.mailbox.put(Submit(*decode_requests(msgspec.msgpack.encode(requests))))

    def abort(self, seq_ids: list[int]) -> None:
        self.mailbox.put(Abort(seq_ids))

    def forget(self, client: int, connection: int, *, is_gone: bool) -> None:
        self.mailbox.put(ForgetClient(client, is_gone, connection))

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have the loop call a utility."""
        command = Utility(method, args, kwargs)
        self.mailbox.put(command)
        return command.reply

    def begin_change(self, activity: Activity, *, clear_cache: bool) -> Future[dict[int, int]]:
        """Have the loop change what the rank does. The result is that of `Mailbox.flush`."""
        command = SetActivity(activity, clear_cache)
        self.mailbox.put(command)
        return command.reply

    def join(self) -> None:
        """Wait for the end of the loop, after `mailbox.stop()`."""
        self._thread.join(WAIT_S)

    def leftovers(self) -> list[str]:
        """What is still held although all requests have ended."""
        return leftovers(self.core, self.mailbox)


class Group:
    """All ranks of an engine: one, or several that share experts. Calls go to all, as the driver's do."""

    def __init__(self, config: EngineConfig) -> None:
        self.shares_experts = config.parallel.is_lockstep
        made: dict[int, Rank] = {}

        def make(dp_rank: int) -> None:
            made[dp_rank] = Rank(config, dp_rank, "there" if self.shares_experts else None)

        run_together(make, range(config.parallel.data_parallel_size))
        self.ranks = [made[dp_rank] for dp_rank in sorted(made)]
        for rank in self.ranks:
            rank.peers = [each for each in self.ranks if each is not rank]

    @property
    def failure(self) -> BaseException | None:
        """Why a loop has ended, if not by `stop`."""
        return next((rank.failure for rank in self.ranks if rank.failure is not None), None)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a utility of all ranks, and wait for the results."""
        return [reply.result(WAIT_S) for reply in self.begin(method, *args)]

    def begin(self, method: str, *args: Any) -> list[Future[Any]]:
        return [rank.begin(method, *args) for rank in self.ranks]

    def change(self, activity: Activity, *, clear_cache: bool = False) -> None:
        """Change what all ranks do, and wait until they have."""
        for reply in [rank.begin_change(activity, clear_cache=clear_cache) for rank in self.ranks]:
            reply.result(WAIT_S)

    def start(self) -> None:
        for rank in self.ranks:
            rank.start()

    def stop(self) -> None:
        """End all loops, and wait for that."""
        for rank in self.ranks:
            rank.mailbox.stop()
        for rank in self.ranks:
            rank.join()


def run_together(work: Callable[[int], object], numbers: Iterable[int]) -> None:
    """Call `work` with each number, on a thread for each."""
    threads = [threading.Thread(target=work, args=[number]) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
