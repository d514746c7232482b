"""The loop of an engine that shares experts with others. The counterpart of `core.run_loop`.

The loop decides when to step and leaves communication to its caller: it announces a wave to its peers through a
callable, and gets theirs as `StartWave` from the mailbox. The workers' exchange in each step keeps the loops in
lockstep.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from raycore.engine.core import EngineCore, apply_command
from raycore.engine.mailbox import Mailbox, StartWave
from raycore.engine.waves import Waves
from raycore.errors import RpcTimeout

logger = logging.getLogger(__name__)


def run_lockstep_loop(core: EngineCore, mailbox: Mailbox, waves: Waves, tell_peers: Callable[[int], None]) -> None:
    """Run waves, and sleep between them, until the mailbox is stopped.

    Raises any error of a step or of `Mailbox.fail()`. Neither the engine nor its peers can continue after that.

    Args:
        tell_peers: sends every other engine a `StartWave` with this number, without waiting for them.
    """
    while not mailbox.stopping:
        is_busy = waves.is_running or core.has_work()
        commands = mailbox.take(0.0 if is_busy else core.idle_wait_s())
        for command in commands:
            if isinstance(command, StartWave):
                waves.start_wave(command.wave)
            else:
                apply_command(command, core, mailbox)
        core.release_prepared()
        if core.has_work():
            wave = waves.has_work()
            if wave is not None:
                tell_peers(wave)
        outputs = None
        if waves.is_running:
            outputs, is_anyone_busy = core.lockstep_step()
            waves.step_done(is_anyone_busy)
        if outputs is not None:
            mailbox.publish(outputs, core.load())
        elif commands:
            mailbox.note_load(core.load())
    _finish_wave(core, mailbox, waves)


def _finish_wave(core: EngineCore, mailbox: Mailbox, waves: Waves) -> None:
    """Run dummy steps until the wave ends, so that peers that are stopping too don't wait for this engine.

    This engine's own requests are dropped. It gives up after `shutdown_timeout_s` if its peers don't stop.
    """
    for command in mailbox.take():
        if isinstance(command, StartWave):
            waves.start_wave(command.wave)
    deadline_s = time.monotonic() + core.config.executor.shutdown_timeout_s
    while waves.is_running and (left_s := deadline_s - time.monotonic()) > 0:
        try:
            waves.step_done(core.dummy_step(left_s))
        except RpcTimeout:
            logger.warning(
                "stopping without waiting longer for the ranks that share experts with this one: they are gone or stuck"
            )
            return
