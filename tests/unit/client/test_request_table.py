"""What a client knows of its requests while ranks come and go. No rank, no thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asks import checked
from configs import make_config

from raycore.client.ask import Ask, CheckedAsk
from raycore.client.inputs import ParsedPrompt
from raycore.client.request_table import RequestTable, Submissions, Updates
from raycore.errors import EngineDeadError, RequestFailed
from raycore.messages import NO_LOAD, EngineRequest, Feature, FeatureData, FinishedRequest, OutputBatch
from raycore.sampling_params import SamplingParams
from raycore.text.tokenizer import Tokenizer

MAX_REPLAYS = 1
KILLED = EngineDeadError("killed")


@pytest.fixture
def table(tokenizer: Tokenizer) -> RequestTable:
    return RequestTable(make_config().model, tokenizer, client_index=0, max_replays=MAX_REPLAYS)


def add(table: RequestTable, request_id: str, **params: Any) -> None:
    table.add(checked(request_id, [5, 6], SamplingParams(**params)), print)


def ids(submissions: Submissions) -> dict[int, list[str]]:
    return {dp_rank: [request.request_id for request in requests] for dp_rank, requests in submissions.items()}


def told(updates: Updates) -> list[tuple[str, type]]:
    return [(update.request_id, type(update.error or update.output)) for _, update in updates]


def lose(table: RequestTable, dp_rank: int, loss: int) -> Submissions:
    table.close_ranks([dp_rank])
    return table.lose_ranks([dp_rank], loss)


def test_requests_wait_until_a_rank_serves(table: RequestTable) -> None:
    add(table, "a")
    assert ids(table.dispatch(["a"])) == {}
    assert (table.num_parked, table.by_rank.counts()) == (1, {})
    assert ids(table.add_rank(0)) == {0: ["a"]}
    assert (table.num_parked, table.by_rank.counts()) == (0, {0: 1})


def test_prompts_count_as_queued_until_their_first_token(table: RequestTable) -> None:
    add(table, "a", n=2)
    add(table, "b")
    assert table.num_queued_tokens == 4
    table.add_rank(0)
    first, second, _ = (request.seq_id for request in table.dispatch(["a", "b"])[0])
    for seq_id in (first, second):
        seq_ids, token_ids = np.array([seq_id], np.int64).tobytes(), np.array([9], np.int32).tobytes()
        table.take(0, NO_LOAD, OutputBatch(seq_ids=seq_ids, token_ids=token_ids, steps=[(1, 0.0, 0.0)]))
        assert table.num_queued_tokens == 2
    table.abort(["b"])
    assert table.num_queued_tokens == 0


def test_a_request_of_a_lost_rank_moves_to_another_rank_with_new_seq_ids(table: RequestTable) -> None:
    table.add_rank(0)
    add(table, "a", n=2)
    before = [request.seq_id for request in table.dispatch(["a"])[0]]
    table.add_rank(1)
    moved = lose(table, 0, 1)
    assert ids(moved) == {1: ["a", "a"]}
    assert not {request.seq_id for request in moved[1]} & set(before)


def test_a_request_on_too_many_failing_ranks_fails_when_the_loss_is_explained(table: RequestTable) -> None:
    table.add_rank(0)
    add(table, "a")
    table.dispatch(["a"])
    assert ids(lose(table, 0, 1)) == {}
    assert table.explain_loss(1, KILLED) == [], "it may be tried once more"
    assert ids(table.add_rank(0)) == {0: ["a"]}
    assert ids(lose(table, 0, 2)) == {}
    # the lost rank's successor may be there first, and has nothing to do with it
    assert ids(table.add_rank(0)) == {}
    assert (len(table), table.by_rank.counts(), table.num_parked) == (1, {}, 0)
    ((sink, update),) = table.explain_loss(2, KILLED)
    assert sink is print
    assert isinstance(update.error, RequestFailed)
    assert "2 ranks failed while they had it" in str(update.error)
    assert update.error.__cause__ is KILLED
    assert len(table) == 0
    assert table.counts()[0].num_finished["error"] == 1
    assert table.explain_loss(2, KILLED) == []


def test_an_aborted_request_counts_as_an_end_on_its_rank_if_it_had_one(table: RequestTable) -> None:
    add(table, "waiting")
    table.abort(["waiting"])
    table.add_rank(0)
    assert table.counts()[0].num_finished["abort"] == 0
    add(table, "a", n=2)
    (before, *_) = table.dispatch(["a"])[0]
    _, aborts = table.abort(["a"])
    assert dict(aborts) == {0: [before.seq_id, before.seq_id + 1]}
    assert table.counts()[0].num_finished["abort"] == 2


def test_a_request_aborted_before_the_loss_is_explained_does_not_fail(table: RequestTable) -> None:
    table.add_rank(0)
    add(table, "a")
    table.dispatch(["a"])
    for loss in (1, 2):
        lose(table, 0, loss)
        table.add_rank(0)
    updates, aborts = table.abort(["a"])
    assert (len(updates), dict(aborts)) == (1, {})
    add(table, "a")  # another one by the same id
    assert table.explain_loss(2, KILLED) == []
    assert "a" in table


def test_an_aborted_request_is_counted_as_that_of_the_rank_that_had_it(table: RequestTable) -> None:
    table.add_rank(0)
    for request_id in ("a", "b"):
        add(table, request_id, n=2)
    table.dispatch(["a"])
    table.abort(["a", "b"])
    assert table.counts()[0].num_finished["abort"] == 2, "no rank had the other one"


def test_a_rank_has_the_requests_that_were_sent_to_it_and_have_not_ended_or_moved(table: RequestTable) -> None:
    for dp_rank in (0, 1):
        table.add_rank(dp_rank)
    for request_id in "abcde":
        add(table, request_id)
        table.dispatch([request_id])
    assert (table.by_rank.on([0]), table.by_rank.on([1]), table.by_rank.on([2])) == (["a", "c", "e"], ["b", "d"], [])
    table.abort(["a"])
    lose(table, 1, 1)
    assert table.by_rank.on([0, 1]) == ["c", "e", "b", "d"]
    assert (table.by_rank.has_any_on([1, 0]), table.by_rank.has_any_on([1])) == (True, False)
    table.abort("bcde")
    assert (table.by_rank.counts(), table.by_rank.has_any_on([0])) == ({}, False)


def test_leaving_ranks_finish_requests_or_hand_them_to_other_ranks(table: RequestTable) -> None:
    table.add_rank(0)
    add(table, "a")
    add(table, "b")
    first, _ = table.dispatch(["a", "b"])[0]
    table.add_rank(1)
    table.close_ranks([0], for_good=True)
    add(table, "c")
    assert ids(table.dispatch(["c"])) == {1: ["c"]}
    by_sink, _ = table.take(0, NO_LOAD, OutputBatch(finished=[FinishedRequest(first.seq_id, "length")]))
    assert [update.request_id for update in by_sink[print]] == ["a"]
    assert ids(table.take_back([0])) == {1: ["b"]}


def test_a_lost_engine_fails_and_forgets_all_requests(table: RequestTable) -> None:
    add(table, "a")
    table.dispatch(["a"])
    table.add_rank(0)
    add(table, "b")
    table.dispatch(["b"])
    assert told(table.fail_all(KILLED)) == [("a", EngineDeadError), ("b", EngineDeadError)]
    assert (len(table), table.num_parked, table.by_rank.on([0])) == (0, 0, [])


def test_a_moved_request_names_the_revision_of_its_adapter_that_made_its_tokens(table: RequestTable) -> None:
    table.add_rank(0)
    for request_id in ("begun", "waiting"):
        add(table, request_id)
    (begun, waiting) = table.dispatch(["begun", "waiting"])[0]
    seq_ids, token_ids = np.array([begun.seq_id], np.int64).tobytes(), np.array([9], np.int32).tobytes()
    revisions = [(begun.seq_id, 4), (waiting.seq_id, 4)]
    table.take(
        0,
        NO_LOAD,
        OutputBatch(seq_ids=seq_ids, token_ids=token_ids, steps=[(1, 0.0, 0.0)], adapter_revisions=revisions),
    )
    table.add_rank(1)
    found = {request.request_id: request.lora_revision for request in lose(table, 0, 1)[1]}
    assert found == {"begun": 4, "waiting": None}


def test_a_sequence_whose_images_a_rank_lacks_is_sent_again_with_all_of_them(tokenizer: Tokenizer) -> None:
    table = RequestTable(make_config().model, tokenizer, client_index=0, max_replays=MAX_REPLAYS, image_bytes=100)
    features = [Feature(name, index, 1) for index, name in enumerate("ab")]
    prompt = ParsedPrompt(
        None, [5, 6], features=features, feature_data=[FeatureData(b"1", [1]), FeatureData(b"2", [1])]
    )
    for dp_rank in (0, 1):
        table.add_rank(dp_rank)
    sent: list[EngineRequest] = []
    for request_id in ("first", "second", "other"):
        table.add(CheckedAsk(Ask(prompt, SamplingParams(), request_id), request_id, 0, 0, SamplingParams(), []), print)
        sent += table.dispatch([request_id])[0]
    assert [[data is not None for data in each.feature_data] for each in sent] == [[True] * 2, [False] * 2, [False] * 2]
    table.take(0, NO_LOAD, OutputBatch(missing_features=[(sent[1].seq_id, ["b"])]))
    ((dp_rank, (again,)),) = table.take_asked_again().items()
    assert (dp_rank, again.seq_id) == (0, sent[1].seq_id)
    assert [data and data.data for data in again.feature_data] == [b"1", b"2"]
    assert table.take_asked_again() == {}, "once"
    # what has ended meanwhile isn't sent again
    table.abort(["other"])
    table.take(0, NO_LOAD, OutputBatch(missing_features=[(sent[2].seq_id, ["b"])]))
    assert not any(table.take_asked_again().values())
