"""What a client tells ranks of each other's blocks, and how requests go from ranks that compute prompts to others."""

from __future__ import annotations

import numpy as np
import pytest
from asks import checked
from configs import make_config

from raycore.client.request_table import RequestTable
from raycore.messages import NO_LOAD, CacheChanges, FinishedRequest, OutputBatch
from raycore.parts.transfers.client.routes import PrefixTransfers
from raycore.parts.transfers.connectors.peers.settings import DisaggregationSettings
from raycore.sampling_params import SamplingParams

PROMPT = list(range(1, 50))


def make_table(tokenizer, roles: DisaggregationSettings | None, num_ranks: int) -> RequestTable:
    table = RequestTable(make_config().model, tokenizer, client_index=0, max_replays=3)
    table.routes = PrefixTransfers(table.router, 4, roles)
    for rank in range(num_ranks):
        table.add_rank(rank, [f"worker of {rank}"])
    return table


def add(table: RequestTable, request_id: str = "a", **params):
    updates = []
    asked = SamplingParams(**{"temperature": 0, "max_tokens": 8, **params})
    table.add(checked(request_id, PROMPT, asked, stream=True), updates.extend)
    return table.dispatch([request_id])


def only(submissions):
    ((rank, (request,)),) = submissions.items()
    return rank, request


def ended(seq_id: int, reason: str = "length", params=None) -> OutputBatch:
    batch = OutputBatch(finished=[FinishedRequest(seq_id, reason)])
    batch.seq_ids, batch.token_ids = np.array([seq_id], np.int64).tobytes(), np.array([7], np.int32).tobytes()
    batch.steps = [(1, 0.0, 0.0)]
    batch.hints = [] if params is None else [(seq_id, params)]
    return batch


ROLES = DisaggregationSettings(num_prefill_ranks=1, min_prefill_tokens=16)


def test_a_prompt_is_computed_on_one_rank_and_goes_on_on_another(tokenizer):
    table = make_table(tokenizer, ROLES, 2)
    rank, request = only(add(table))
    assert rank == 0
    assert (request.hands_over, request.hints) == (True, None)
    told = {"workers": ["x"], "num_tokens": 32}
    by_sink, _ = table.take(0, NO_LOAD, ended(request.seq_id, params=told))
    ((update,),) = by_sink.values()
    assert update.output.outputs[0].token_ids == [7]
    assert not update.output.finished
    assert table.has_computed
    rank, later = only(table.continue_computed())
    assert (rank, later.output_token_ids, later.hints, later.hands_over) == (1, [7], told, False)
    assert later.seq_id != request.seq_id
    assert table.router.num_own(0) == 0
    assert not table.has_computed
    by_sink, _ = table.take(1, NO_LOAD, ended(later.seq_id))
    ((update,),) = by_sink.values()
    assert update.is_last
    assert update.output.outputs[0].token_ids == [7, 7]
    assert len(table) == 0


@pytest.mark.parametrize(("reason", "params"), [("stop", {}), ("length", {"max_tokens": 2})])
def test_a_request_may_end_with_its_first_tokens(tokenizer, reason, params):
    table = make_table(tokenizer, ROLES, 2)
    _, request = only(add(table, **params))
    batch = ended(request.seq_id, reason)
    if reason == "length":  # and not by what the rank was told: all tokens are there
        table.take(0, NO_LOAD, batch)
        _, later = only(table.continue_computed())
        table.take(1, NO_LOAD, ended(later.seq_id))
    else:
        table.take(0, NO_LOAD, batch)
    assert len(table) == 0
    assert not table.has_computed


def test_short_prompts_and_those_of_one_token_go_to_decode_ranks_at_once(tokenizer):
    table = make_table(tokenizer, DisaggregationSettings(min_prefill_tokens=100), 2)
    assert only(add(table))[0] == 1
    table = make_table(tokenizer, ROLES, 2)
    assert only(add(table, max_tokens=1))[0] == 1
    assert only(add(table, "b", prompt_logprobs=1))[0] == 1


def test_what_decode_ranks_hold_is_not_computed_again(tokenizer):
    table = make_table(tokenizer, ROLES, 2)
    assert isinstance(table.routes, PrefixTransfers)
    table.routes.held.take(1, CacheChanges(b"".join(table.routes.held.keys(PROMPT))))
    assert only(add(table))[0] == 1


def test_several_sequences_go_on_together(tokenizer):
    table = make_table(tokenizer, ROLES, 3)
    ((rank, requests),) = add(table, n=2, temperature=1.0).items()
    assert rank == 0
    table.take(0, NO_LOAD, ended(requests[0].seq_id))
    assert table.continue_computed() == {}
    table.take(0, NO_LOAD, ended(requests[1].seq_id, params={"lease": 1}))
    ((rank, later),) = table.continue_computed().items()
    assert rank > 0
    assert [each.output_token_ids for each in later] == [[7], [7]]
    assert later[1].hints == {"lease": 1}


def test_ranks_of_one_kind_do_all_when_the_others_are_gone(tokenizer):
    table = make_table(tokenizer, ROLES, 2)
    _, request = only(add(table))
    table.close_ranks([0])
    rank, again = only(table.lose_ranks([0], 1))
    assert (rank, again.hands_over) == (1, False)
    table.take(0, NO_LOAD, ended(request.seq_id))  # late
    assert not table.has_computed
    table = make_table(tokenizer, ROLES, 2)
    table.close_ranks([1])
    assert only(add(table))[1].hints is None


def test_a_lost_decode_rank_has_its_requests_computed_again(tokenizer):
    table = make_table(tokenizer, ROLES, 3)
    _, request = only(add(table))
    table.take(0, NO_LOAD, ended(request.seq_id))
    rank, _ = only(table.continue_computed())
    table.close_ranks([rank])
    again, third = only(table.lose_ranks([rank], 1))
    assert (again, third.output_token_ids, third.hands_over) == (0, [7], True)


def test_aborted_requests_do_not_go_on(tokenizer):
    table = make_table(tokenizer, ROLES, 2)
    _, request = only(add(table))
    table.abort(["a"])
    table.take(0, NO_LOAD, ended(request.seq_id))
    assert table.continue_computed() == {}
    add(table, "b")
    ((_, (request,)),) = add(table, "c").items()
    table.take(0, NO_LOAD, ended(request.seq_id))
    table.abort(["c"])
    assert table.continue_computed() == {}


def test_ranks_are_told_who_holds_more_of_a_prompt(tokenizer):
    table = make_table(tokenizer, None, 2)
    assert isinstance(table.routes, PrefixTransfers)
    keys = table.routes.held.keys(PROMPT)
    table.routes.held.take(1, CacheChanges(b"".join(keys[:8])))
    table.close_ranks([1])
    assert only(add(table))[1].hints is None
    table.add_rank(1, ["worker of 1"])
    table.routes.held.take(1, CacheChanges(b"".join(keys[:8])))
    for index in range(12):  # until rank 1 has too much to do
        rank, request = only(add(table, f"more {index}"))
        if rank == 0:
            assert request.hints == {
                "workers": ["worker of 1"],
                "num_tokens": 32,
            }
            return
    raise AssertionError("all requests went to one rank")
