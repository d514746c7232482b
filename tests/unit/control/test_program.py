"""Commands of other processes become calls, and errors become outcomes."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from ray.exceptions import RayActorError

from raycore.control import program as program_module
from raycore.control.commands import CallCommand, CommandOutcome
from raycore.control.program import ControlThread
from raycore.errors import ControlError, InvalidConfig
from raycore.same_copy import seal, unseal
from raycore.status import EngineStatus


class Program:
    """A program's side, and an actor that only takes the outcome."""

    def __init__(self, error: Exception | None = None, *, is_up: bool = True) -> None:
        self.called: list[dict[str, object]] = []
        self.error = error
        self.outcomes: list[CommandOutcome] = []
        self.control = ControlThread("demo", lambda: EngineStatus("demo", "model", []), {"scale": self._scale})
        self.control._is_up = is_up
        self.actor = SimpleNamespace(finish=SimpleNamespace(remote=self._finish))

    def _scale(self, **arguments: object) -> None:
        self.called.append(arguments)
        if self.error is not None:
            raise self.error

    def _finish(self, number: int, outcome: bytes, status: bytes) -> None:
        message = unseal(outcome, "the program", ControlError)
        self.outcomes.append(msgspec.msgpack.decode(message, type=CommandOutcome))

    def execute(self, method: str = "scale", **arguments: object) -> str | None:
        data = seal(msgspec.msgpack.encode(CallCommand(method, arguments)))
        self.control._execute(self.actor, 7, data)  # pyright: ignore[reportArgumentType]
        return self.outcomes.pop().error


def test_a_control_command_calls_the_engine():
    program = Program()
    assert program.execute(data_parallel_size=3, drain_timeout_s=None) is None
    assert program.called == [{"data_parallel_size": 3, "drain_timeout_s": None}]


@pytest.mark.parametrize("error", [InvalidConfig("data_parallel_size=0 isn't positive"), ZeroDivisionError("no")])
def test_the_error_of_a_call_is_the_outcome_of_its_command(error: Exception):
    assert str(error) in (Program(error).execute(data_parallel_size=0) or "")


def test_a_starting_engine_refuses_control_commands():
    program = Program(is_up=False)
    assert program.execute(data_parallel_size=3) == "engine demo is still starting"
    assert program.called == []


def test_a_control_command_can_only_call_what_is_offered():
    program = Program()
    assert "shutdown" in (program.execute("shutdown") or "")
    assert program.called == []


@pytest.mark.parametrize(("failure", "num_actors"), [("its node has ended", 0), (None, 3)])
def test_an_engine_that_has_failed_gets_no_control_actor_any_more(monkeypatch, failure: str | None, num_actors: int):
    monkeypatch.setattr(program_module, "_DELAY_S", 0.0)
    monkeypatch.setattr(program_module, "_RETRY_S", 0.0)
    monkeypatch.setattr(program_module, "is_connected", lambda: True)
    control = ControlThread("demo", lambda: EngineStatus("demo", "model", [], failure=failure), {})
    created = list[EngineStatus]()

    def create(status: EngineStatus) -> None:
        created.append(status)
        if len(created) == 3:
            control.stop()
        raise RayActorError(error_msg="the actor died")

    monkeypatch.setattr(control, "_create", create)
    control._run()
    assert len(created) == num_actors
