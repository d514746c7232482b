"""Ids that belong to calls that may have no request at the time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
from configs import make_config

from raycore.client.client import EngineClient
from raycore.client.reserved_ids import ReservedIds
from raycore.errors import EngineDeadError, InvalidRequest


@pytest.mark.parametrize(
    ("abort", "expected", "num_aborted"),
    [
        (lambda client: client.abort(["a", "c"], notify=True), ["a"], None),
        (lambda client: client.abort(["a"]), [], None),
        (lambda client: client.abort_all(), ["a", "b-1"], None),
        (lambda client: client.abort_groups(None), ["a", "b-1"], 2),
        (lambda client: client.abort_groups(["b"]), ["b-1"], 1),
    ],
)
def test_a_clients_aborts_reach_reserved_ids(
    tokenizer, abort: Callable[[EngineClient], int | None], expected, num_aborted
):
    client = EngineClient(make_config(), tokenizer)
    came: list[str] = []
    with ExitStack() as stack:
        for each in ("a", "b-1"):
            stack.enter_context(client.reserved.reserve(each, lambda failure, each=each: came.append(each)))
        assert abort(client) == num_aborted
    assert sorted(came) == expected
    came.clear()
    client.abort_all()
    assert not came


def test_an_id_is_reserved_once():
    reserved = ReservedIds()
    with reserved.reserve("a", print):
        with pytest.raises(InvalidRequest, match="request_id='a' is already in use"), reserved.reserve("a", print):
            pass
        assert "a" in reserved
    assert "a" not in reserved


def test_an_engines_failure_reaches_reserved_ids_also_later_ones(tokenizer):
    client = EngineClient(make_config(), tokenizer)
    came: list[BaseException | None] = []
    failure = EngineDeadError("the ranks have died")
    with client.reserved.reserve("a", came.append):
        client.close(failure)
        assert came == [failure]
    with client.reserved.reserve("b", came.append):
        assert came == [failure, failure]
