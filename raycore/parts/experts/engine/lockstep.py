"""The loop of an engine that shares experts with others. Engines that share none run `loop.run_loop` instead.

Engines that share experts run every step together; `waves` describes when. This loop leaves communication to its
caller. It calls a function to tell the other engines that a wave starts, and gets their messages from the mailbox, as
`StartWave` commands. The workers of all engines exchange data in every step, which keeps the loops in lockstep.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from raycore.engine.core import EngineCore
from raycore.engine.loop import apply_command, make_changes, release_prepared
from raycore.engine.mailbox import Mailbox, StartWave
from raycore.errors import RpcTimeout
from raycore.parts.experts.engine.waves import Waves
from raycore.scheduler.outputs import StepOutputs
from raycore.system import time

logger = logging.getLogger(__name__)


def run_lockstep_loop(
    core: EngineCore,
    mailbox: Mailbox,
    waves: Waves,
    tell_peers: Callable[[int], None],
) -> None:
    """Run waves of steps, and sleep between waves, until the mailbox is stopped or the engine's group has changed.

    Raises the error of a step, or the error passed to `Mailbox.fail()`. Neither this engine nor the engines that share
    experts with it can continue afterwards.

    Args:
        tell_peers: called with the number of a wave that this engine starts. Sends a `StartWave` with this number to
            every other engine, without waiting for them.
    """
    while not mailbox.stopping:
        commands = mailbox.take(0.0 if waves.is_running else core.wait_s())
        for command in commands:
            if isinstance(command, StartWave):
                _start_wave(waves, command)
            else:
                apply_command(command, core, mailbox)
        release_prepared(core, mailbox)
        if core.has_work():
            wave = waves.has_work()
            if wave is not None:
                tell_peers(wave)
        outputs = None
        if waves.is_running:
            outputs = _step(core, waves)
        if outputs is not None:
            mailbox.publish(outputs, core.load())
        elif commands:
            mailbox.note_load(core.load())
        # a paused engine takes part in a wave until it ends, which it does when all engines are paused
        if mailbox.changes and not (waves.is_running or core.has_work()) and make_changes(core, mailbox):
            return
    _finish_wave(core, mailbox, waves)


def _step(core: EngineCore, waves: Waves, timeout_s: float | None = None) -> StepOutputs | None:
    """Start a step of the wave and finish one, as far as `waves` and the number of steps in flight allow."""
    outputs, is_anyone_busy = core.lockstep_step(may_start=waves.may_start, timeout_s=timeout_s)
    if is_anyone_busy is not None:
        waves.step_done(is_anyone_busy, core.num_in_flight)
    return outputs


def _start_wave(waves: Waves, command: StartWave) -> None:
    assert command.generation <= waves.generation, f"{command}: this engine hasn't joined that group"
    if command.generation == waves.generation:
        waves.start_wave(command.wave)


def _finish_wave(core: EngineCore, mailbox: Mailbox, waves: Waves) -> None:
    """Run dummy steps until the current wave ends, because engines that are stopping, too, would wait for this one.

    Requests of this engine get no further steps. If the wave doesn't end, this gives up after `shutdown_timeout_s`.
    """
    for command in mailbox.take():
        if isinstance(command, StartWave):
            _start_wave(waves, command)
    core.pause()
    deadline_s = time.monotonic() + core.config.executor.shutdown_timeout_s
    while waves.is_running and (left_s := deadline_s - time.monotonic()) > 0:
        try:
            _step(core, waves, left_s)
        except RpcTimeout:
            logger.warning(
                "stopping without waiting longer for the ranks that share experts with this one: they are gone or stuck"
            )
            return
