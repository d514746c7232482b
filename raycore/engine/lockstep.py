"""The loop of an engine that shares experts with others: what `core.run_loop` is to an engine alone.

Knows when to step, not how engines reach each other: peers are told of a wave through a callable, and tell of theirs
with `StartWave` in the mailbox. The exchange in each step, between the workers, keeps the loops together.
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
    """Run waves, and sleep between them, until the mailbox is told to stop.

    Raises whatever a step raises or the mailbox was told of: the engine, and with it its peers, are then done for.

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
    """Keep peers that are stopping too from waiting in a step that this engine would be missing from.

    Its own requests are dropped. Peers that go on can't be helped: after a while this engine leaves all the same.
    """
    for command in mailbox.take():
        if isinstance(command, StartWave):
            waves.start_wave(command.wave)
    deadline_s = time.monotonic() + core.config.executor.shutdown_timeout_s
    while waves.is_running and (left_s := deadline_s - time.monotonic()) > 0:
        try:
            waves.step_done(core.dummy_step(left_s))
        except RpcTimeout:
            logger.warning("stopping in the middle of a wave, whose other engines are gone or stuck")
            return
