"""What callers of a rank's utilities get when it answers with an error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RayError, UnserializableException

from raycore.client import rank_connections
from raycore.client.rank_connections import call_utility
from raycore.errors import EngineDeadError


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ActorDiedError(), EngineDeadError), (UnserializableException("two arguments"), UnserializableException)],
)
def test_an_exception_of_a_utility_that_cant_be_unpickled_is_not_the_loss_of_its_rank(
    error: RayError, raised: type[Exception], monkeypatch
):
    def get_all(refs: object, timeout_s: float) -> None:
        raise error

    monkeypatch.setattr(rank_connections, "get_all", get_all)
    rank = SimpleNamespace(actor=SimpleNamespace(utility=SimpleNamespace(remote=lambda *_: None)))
    with pytest.raises(raised):
        call_utility([rank], "collective_rpc", (), 5.0)  # type: ignore[list-item]
