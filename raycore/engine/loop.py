"""The loop of an engine: applies the commands in its mailbox, runs steps, and puts their outputs into the mailbox.

Engines that share experts with others run `lockstep.run_lockstep_loop` instead, which uses the same parts.
"""

from __future__ import annotations

from raycore.engine.core import EngineCore
from raycore.engine.mailbox import (
    Abort,
    Change,
    Command,
    ForgetClient,
    Mailbox,
    PauseForRegrouping,
    Regroup,
    SetActivity,
    StartWave,
    Submit,
    Utility,
)
from raycore.engine.utilities import call_utility
from raycore.errors import InvalidRequest


def run_loop(core: EngineCore, mailbox: Mailbox) -> None:
    """Run steps while there is work, and sleep while there is none.

    Returns when the mailbox is stopped, or when the rank has joined another group of ranks that share experts. Raises
    the error of a step, or the error passed to `Mailbox.fail()`. The rank can't continue afterwards.
    """
    while not mailbox.stopping:
        commands = mailbox.take(core.wait_s())
        for command in commands:
            apply_command(command, core, mailbox)
        release_prepared(core, mailbox)
        outputs = core.step()
        if outputs is not None:
            mailbox.publish(outputs, core.load())
        elif commands:
            mailbox.note_load(core.load())
        if mailbox.changes and not core.has_work() and make_changes(core, mailbox):
            return


def release_prepared(core: EngineCore, mailbox: Mailbox) -> None:
    """Let requests start whose grammars and adapters are ready. Tells the clients of those that can't start."""
    failed = core.release_prepared()
    if failed:
        mailbox.note_load(core.load())  # it may be that no step and no command follows
    for seq_id, why in failed.items():
        mailbox.refuse(seq_id, why, "failed")


def make_changes(core: EngineCore, mailbox: Mailbox) -> bool:
    """Make the changes that wait in the mailbox. Call this when the rank is at rest.

    Returns: whether the rank has joined another group. Changes after that one still wait then.

    Raises what a worker raised, after the callers have got the error. The rank can't continue afterwards.
    """
    while mailbox.changes:
        command = mailbox.changes.popleft()
        try:
            _make_change(command, core, mailbox)
        except BaseException as error:
            command.reply.set_exception(error)
            raise
        if isinstance(command, Regroup):
            return True
    return False


def _make_change(command: Change, core: EngineCore, mailbox: Mailbox) -> None:
    if isinstance(command, SetActivity):
        core.set_activity(command.activity, clear_cache=command.clear_cache)
        mailbox.note_load(core.load())
        command.reply.set_result(mailbox.flush())
        return
    if isinstance(command, Regroup):
        core.regroup(command.regrouping, stays=command.stays)
    command.reply.set_result(None)


def apply_command(command: Command, core: EngineCore, mailbox: Mailbox) -> None:
    """Apply a client's command to `core`. Requests that can't be added are refused through `mailbox`."""
    if isinstance(command, Submit):
        for seq_id, reason in command.undecodable:
            mailbox.refuse(seq_id, reason, "failed")
        for request in command.requests:
            if mailbox.is_forgotten(request.seq_id):
                continue
            try:
                missing = core.submit(request, command.arrived_s)
                if missing:
                    mailbox.ask_for_features(request.seq_id, missing)
            except InvalidRequest as error:
                mailbox.refuse(request.seq_id, str(error))
    elif isinstance(command, Abort):
        core.abort(command.seq_ids)
    elif isinstance(command, ForgetClient):
        core.abort_client(command.client)
        mailbox.forget_client(command.client, is_gone=command.is_gone, connection=command.connection)
    elif isinstance(command, Utility):
        call_utility(core.utilities.functions, command)
    elif isinstance(command, StartWave):
        pass  # it is late: the engine has left that group
    else:
        if isinstance(command, PauseForRegrouping):
            core.pause_for_regrouping()
        elif isinstance(command, SetActivity) and command.activity.is_paused:
            core.pause()
        mailbox.changes.append(command)
