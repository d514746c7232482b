"""Utilities reply at once, or when what they have begun is done."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from raycore.engine.mailbox import Utility
from raycore.engine.utility import call_utility


class Target:
    def __init__(self) -> None:
        self.later = Future[int]()

    def utility_now(self) -> int:
        return 1

    def utility_later(self) -> Future[int]:
        return self.later


def test_a_utility_may_reply_later() -> None:
    target = Target()
    now, later = Utility("now", (), {}), Utility("later", (), {})
    for command in (now, later):
        call_utility(target, command)
    assert now.reply.result(0) == 1
    assert not later.reply.done()
    target.later.set_result(2)
    assert later.reply.result(0) == 2


def test_an_error_that_comes_later_is_the_reply() -> None:
    target = Target()
    command = Utility("later", (), {})
    call_utility(target, command)
    target.later.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        command.reply.result(0)
