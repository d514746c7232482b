"""Stores of torch's where nobody answers."""

from __future__ import annotations

import pytest

from raycore.node.listeners import listen
from raycore.parallel.torch_store import connect


def test_a_store_that_does_not_answer_has_a_deadline() -> None:
    with listen("127.0.0.1") as silent, pytest.raises(TimeoutError, match=r"nobody answers at 127.*within 0\.2 s"):
        connect("127.0.0.1", silent.getsockname()[1], 2, 0.2, waits=False)
