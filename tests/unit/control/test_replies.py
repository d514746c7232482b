"""What the driver makes of the replies of ranks."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import replies_of_ranks
from ray.exceptions import ActorDiedError, RayTaskError, UnserializableException

from raycore.control.replies import take_replies


def test_ranks_that_have_died_are_no_ranks_that_have_failed(monkeypatch: pytest.MonkeyPatch):
    replies_of_ranks.use_futures(monkeypatch)
    odd, unknown = ValueError("7 is odd"), UnserializableException("two arguments")
    asked: dict[Any, Any] = {}
    for name, error in [("died", ActorDiedError()), ("failed", RayTaskError("add", "", odd)), ("unknown", unknown)]:
        reply = Future[None]()
        reply.set_exception(error)
        asked[reply] = name
    replies = take_replies(asked, 5.0, lambda: False)
    assert replies.errors == [("failed", odd), ("unknown", unknown)]
    assert replies.results == replies.late == []
