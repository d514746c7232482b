"""Objects of a process, in a child that was forked from it, and where someone wants to send them."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable

import pytest
from forks import in_child
from ray import cloudpickle

from raycore.errors import ControlError, InvalidInput
from raycore.node import own_process
from raycore.node.own_process import OwnProcess


class Engine(OwnProcess):
    def __init__(self) -> None:
        self.num_ended = 0
        self.is_disowned = False

    def generate(self) -> str:
        return "text"

    @property
    def name(self) -> str:
        return "a name"

    def shutdown(self) -> None:
        self.num_ended += 1

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _disown(self) -> None:
        self.is_disowned = True


def test_a_copy_in_a_child_says_how_to_reach_an_engine() -> None:
    engine = Engine()
    generate, parent = engine.generate, os.getpid()

    def check() -> None:
        for use in (lambda: engine.generate(), lambda: engine.name, lambda: engine.num_ended, engine_in_with):
            with pytest.raises(ControlError) as raised:
                use()
            said = str(raised.value)
            assert said.startswith(f"this Engine belongs to process {parent}, from which process {os.getpid()} was")
            assert "docs/engines-in-actors.md" in said
            assert "\n" not in said
        assert generate() == "text"  # the method of the copy: whatever it uses of it raises
        assert isinstance(engine, Engine)
        assert repr(engine) == f"<Engine of process {parent}>"

    def engine_in_with() -> None:
        with engine as entered:
            entered.generate()

    in_child(check)
    assert engine.generate() == "text"


def test_the_end_of_a_copy_in_a_child_does_nothing() -> None:
    engine = Engine()

    def check() -> None:
        engine.shutdown()
        with engine:
            pass
        own = vars(engine)
        assert (own["num_ended"], own["is_disowned"]) == (0, True)

    in_child(check)
    engine.shutdown()
    assert (engine.num_ended, engine.is_disowned) == (1, False)


def test_a_child_of_a_child_names_the_process_that_has_the_object() -> None:
    engine, parent = Engine(), os.getpid()

    def check() -> None:
        with pytest.raises(ControlError, match=f"belongs to process {parent}"):
            engine.generate()

    in_child(lambda: in_child(check))


def test_subclasses_may_compare_by_value_and_define_their_own_subclassing() -> None:
    class ByValue(Engine):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, ByValue)

    class Tagged(Engine):
        def __init_subclass__(cls, *, tag: str) -> None:
            super().__init_subclass__()

    engines = [Tagged(), ByValue(), ByValue()]

    def check() -> None:
        for engine in engines:
            with pytest.raises(ControlError, match="belongs to process"):
                engine.generate()

    in_child(check)


def test_what_a_child_makes_itself_works_there() -> None:
    of_parent = Engine()

    def check() -> None:
        engine = Engine()
        assert engine.generate() == "text"
        engine.shutdown()
        assert engine.num_ended == 1

    in_child(check)
    assert of_parent.num_ended == 0


@pytest.mark.parametrize("send", [pickle.dumps, cloudpickle.dumps, copy.copy, copy.deepcopy])
def test_objects_of_a_process_refuse_to_be_sent(send: Callable[[object], object]) -> None:
    with pytest.raises(InvalidInput, match=r"Engine can't be copied, pickled or sent .*engines-in-actors\.md\)$"):
        send(Engine())


def test_no_object_is_kept() -> None:
    engine = Engine()
    assert id(engine) in own_process._made
    before = len(own_process._made)
    del engine
    assert len(own_process._made) < before
