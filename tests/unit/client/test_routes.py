"""What a table of requests may rely on of the routes that it is given, whoever chooses them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from asks import checked
from configs import make_config

from raycore.client.request_table import RequestTable
from raycore.client.routes import Routes
from raycore.client.routing import Router
from raycore.messages import CacheChanges, EngineRequest
from raycore.parts.transfers.client.routes import PrefixTransfers
from raycore.parts.transfers.connectors.peers.settings import DisaggregationSettings
from raycore.sampling_params import SamplingParams
from raycore.text.tokenizer import Tokenizer

PROMPT = list(range(40))
DIVIDED = DisaggregationSettings(num_prefill_ranks=1, min_prefill_tokens=8)
Make = Callable[[Router], Routes]
KINDS: dict[str, Make] = {
    "plain": Routes,
    "transfers": lambda router: PrefixTransfers(router, 4),
    "divided": lambda router: PrefixTransfers(router, 4, DIVIDED),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def routes(request: pytest.FixtureRequest) -> Routes:
    router = Router(range(3))
    made = request.param(router)
    for rank in range(3):
        made.add_rank(rank, [f"worker of {rank}"])
    return made


def asked(**fields: object) -> EngineRequest:
    return EngineRequest(0, "a", PROMPT, SamplingParams(max_tokens=9), 0, **fields)  # pyright: ignore


def test_a_request_goes_to_a_rank_in_service_and_counts_there_until_it_ends(routes: Routes) -> None:
    found = [routes.route(asked(), None, None).rank for _ in range(6)]
    assert set(found) <= {0, 1, 2}
    router = routes._router
    assert {rank: router.num_own(rank) for rank in range(3)} == {rank: found.count(rank) for rank in range(3)}
    for rank in found:
        router.finish(rank)
    assert all(router.num_own(rank) == 0 for rank in range(3))


def test_a_request_goes_to_the_rank_that_its_caller_asked_for(routes: Routes) -> None:
    assert [routes.route(asked(), None, rank).rank for rank in (2, 0, 1)] == [2, 0, 1]
    assert not routes.route(asked(), None, 2).hands_over


def test_while_that_rank_is_away_another_one_takes_it(routes: Routes) -> None:
    routes._router.remove(2)
    assert routes.route(asked(), None, 2).rank in (0, 1)


def test_what_ranks_say_of_their_blocks_changes_no_rank_that_was_asked_for(routes: Routes) -> None:
    routes.take(1, CacheChanges(b""))
    assert routes.route(asked(), None, 2).rank == 2


def test_a_request_goes_on_at_a_rank_in_service(routes: Routes) -> None:
    first = routes.route(asked(), None, None)
    routes._router.finish(first.rank)
    assert routes.route_on(asked(output_token_ids=[5]), None, None).rank in (0, 1, 2)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_ranks_are_told_only_what_a_route_says(make: Make, tokenizer: Tokenizer) -> None:
    table = RequestTable(make_config().model, tokenizer, client_index=0, max_replays=1)
    table.routes = make(table.router)
    for rank in range(3):
        table.add_rank(rank, [f"worker of {rank}"])
    table.add(checked("a", PROMPT), print)
    ((_, (sent,)),) = table.dispatch(["a"]).items()
    assert (sent.hints, sent.hands_over) == (None, make is KINDS["divided"])
