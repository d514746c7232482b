"""One rank: the real core, mailbox and loop, as the rank's actor has them."""

from __future__ import annotations

from typing import Any

import msgspec

from raycore.activity import Activity
from raycore.config import EngineConfig
from raycore.engine.core import EngineCore
from raycore.engine.decoding import decode_requests
from raycore.engine.loop import run_loop
from raycore.engine.mailbox import Abort, ForgetClient, Mailbox, SetActivity, Submit, Utility
from raycore.executor.inline import InlineExecutor
from raycore.messages import EngineRequest
from raycore.scheduler.outputs import StepOutputs
from raycore.scheduler.scheduler import Scheduler
from raycore.system import Future, threading
from raycore.worker.rank import RankIdentity
from simulation.worker.model import Shape

WAIT_S = 200.0
"""Virtual seconds that any call may take."""
_STEPS_PER_CHECK = 8


class Rank:
    """See the module. Any thread calls its methods."""

    def __init__(self, config: EngineConfig) -> None:
        self.core = EngineCore(config, InlineExecutor(config, RankIdentity(0, 1)))
        self.mailbox = Mailbox()
        self.failure: BaseException | None = None
        """Why the loop has ended, if not by `stop`."""
        self.num_steps = 0
        spec = config.model.spec
        self.shape = Shape(spec.vocab_size, tuple(self.core.cache.layout.windows), spec.state is not None)
        self._step = self.core.step
        self.core.step = self._checked_step
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
            run_loop(self.core, self.mailbox)
        except Exception as error:
            self.failure = error
        finally:
            self.mailbox.close()
        self.core.shutdown()

    def _checked_step(self) -> StepOutputs | None:
        outputs = self._step()
        self.num_steps += outputs is not None
        if self.num_steps % _STEPS_PER_CHECK == 0:
            self.scheduler.check_integrity()
        return outputs

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

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility, and wait for its result."""
        return self.begin(method, *args, **kwargs).result(WAIT_S)

    def change(self, activity: Activity, *, clear_cache: bool = False) -> dict[int, int]:
        """Change what the rank does, and wait until it has. Returns what `Mailbox.flush` does."""
        command = SetActivity(activity, clear_cache)
        self.mailbox.put(command)
        return command.reply.result(WAIT_S)

    def stop(self) -> None:
        """End the loop, and wait for that."""
        self.mailbox.stop()
        self._thread.join(WAIT_S)

    def leftovers(self) -> list[str]:
        """What is still held although all requests have ended."""
        core, scheduler = self.core, self.scheduler
        load, adapters = core.load(), core._preparation.adapters
        held = {
            "running requests": load.num_running,
            "waiting requests": load.num_waiting,
            "share of blocks": load.kv_usage,
            "steps in flight": len(core._in_flight),
            "arrival times": core._arrived_s,
            "requests": scheduler._requests,
            "requests held back": scheduler._held,
            "adapters of running requests": scheduler._adapters,
            "adapters in use": adapters is not None and (adapters._used or adapters._waiting or adapters._failed),
            "grammars under way": core._preparation._grammars._deadlines_s,
            "changes": self.mailbox.changes,
        }
        scheduler.check_integrity()
        return [f"{name}: {value}" for name, value in held.items() if value]
