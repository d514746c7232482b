"""Commands in, batches out: order, coalescing, clients kept apart, closing."""

import threading
import time
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
from waiting import LONG_S

from raycore.engine.mailbox import Abort, Mailbox, Utility
from raycore.errors import EngineDeadError
from raycore.messages import (
    FinishedRequest,
    LoadView,
    OutputBatch,
    Pooled,
    SequenceEvents,
    TokenLogprobs,
    TokenReport,
    first_seq_id,
)
from raycore.scheduler.outputs import StepOutputs

LOAD = LoadView(1, 2, 0.5)


def step(seq_ids: list[int], tokens: list[int], interval: float = 0.0, **fields) -> StepOutputs:
    return StepOutputs(
        seq_ids=np.array(seq_ids, np.int64), token_ids=np.array(tokens, np.int32), flush_interval_s=interval, **fields
    )


def next_batch(stream) -> OutputBatch:
    return msgspec.msgpack.decode(next(stream), type=OutputBatch)


def tokens_of(batch: OutputBatch) -> list[tuple[int, int]]:
    seq_ids, token_ids = np.frombuffer(batch.seq_ids, np.int64), np.frombuffer(batch.token_ids, np.int32)
    return list(zip(seq_ids.tolist(), token_ids.tolist(), strict=True))


def test_the_mailbox_returns_commands_in_order():
    mailbox = Mailbox()
    mailbox.put(Abort([1]))
    mailbox.put(Abort([2]))
    assert [c.seq_ids for c in mailbox.take()] == [[1], [2]]
    assert mailbox.take() == []


def test_a_command_wakes_the_waiting_engine_loop():
    mailbox = Mailbox()
    threading.Timer(0.05, mailbox.put, [Abort([7])]).start()
    assert [c.seq_ids for c in mailbox.take(wait_s=30)] == [[7]]


def test_a_failure_wakes_the_engine_loop_and_the_first_failure_is_kept():
    mailbox = Mailbox()
    mailbox.fail(KeyError("first"))
    mailbox.fail(KeyError("second"))
    with pytest.raises(KeyError, match="first"):
        mailbox.take(wait_s=30)


def test_tokens_within_the_flush_interval_are_held_back_until_a_request_finishes():
    mailbox = Mailbox()
    mailbox.publish(step([1, 2], [10, 20], interval=60.0), LOAD)
    mailbox.publish(step([1, 2], [11, 21], interval=60.0, finished=[FinishedRequest(2, "length")]), LOAD)
    batch = next_batch(mailbox.outputs(0))
    assert tokens_of(batch) == [(1, 10), (2, 20), (1, 11), (2, 21)]
    assert [f.seq_id for f in batch.finished] == [2]
    assert batch.load == LOAD


def test_every_step_is_sent_at_a_flush_interval_of_zero():
    mailbox = Mailbox()
    stream = mailbox.outputs(0)
    mailbox.publish(step([1], [10]), LOAD)
    assert tokens_of(next_batch(stream)) == [(1, 10)]
    mailbox.publish(step([1], [11]), LOAD)
    assert tokens_of(next_batch(stream)) == [(1, 11)]


def test_entries_of_several_steps_are_sent_in_the_order_of_the_steps():
    mailbox = Mailbox()
    first, second, third = (TokenLogprobs([token], [-1.0], 1) for token in (10, 11, 21))
    mailbox.publish(step([1, 2], [10, 20], interval=60.0, logprobs=[(1, first)], started=[(2, 0)]), LOAD)
    mailbox.publish(step([1, 2], [11, 21], logprobs=[(1, second), (2, third)], started=[(1, 3)]), LOAD)
    batch = next_batch(mailbox.outputs(0))
    assert batch.logprobs == [(1, first), (1, second), (2, third)]
    assert batch.started == [(2, 0), (1, 3)]


def entry_of(field: str, seq_id: int) -> tuple[Any, ...]:
    """What may stand in this field."""
    (entry,) = get_args(get_type_hints(SequenceEvents)[field])
    if entry is FinishedRequest:
        return FinishedRequest(seq_id, "stop")
    values = {int: 1, float: 0.5, TokenLogprobs: TokenLogprobs([1], [-1.0], 1), list[TokenLogprobs]: []}
    values |= {bytes: b"12", list[bytes]: [b"34"], Pooled: Pooled(b"1234", [1]), list[str]: ["image"]}
    values |= {dict[str, Any]: {"remote": 1}, TokenReport: TokenReport("experts", 0, 1, b"5")}
    return seq_id, *(values[kind] for kind in get_args(entry)[1:])


@pytest.mark.parametrize("field", SequenceEvents.__struct_fields__)
def test_each_kind_of_entry_is_sent_only_to_the_client_of_its_sequence(field):
    mailbox = Mailbox()
    other = first_seq_id(1)
    mine, theirs = entry_of(field, 1), entry_of(field, other)
    for _ in range(2):
        mailbox.publish(step([], [], **{field: [mine, theirs]}), LOAD)
    for client, entry in ((0, mine), (1, theirs)):
        batch = next_batch(mailbox.outputs(client))
        assert getattr(batch, field) == [entry] * 2


def test_clients_get_only_the_outputs_of_their_own_sequences():
    mailbox = Mailbox()
    other = first_seq_id(1)
    logprobs = TokenLogprobs([20], [-1.0], 1)
    outputs = step(
        [1, other + 1, 2],
        [10, 20, 30],
        logprobs=[(other + 1, logprobs)],
        started=[(other + 1, 0)],
        queued=[(other + 1, 0.5)],
        finished=[FinishedRequest(1, "stop")],
    )
    mailbox.publish(outputs, LOAD)
    mine, theirs = next_batch(mailbox.outputs(0)), next_batch(mailbox.outputs(1))
    assert tokens_of(mine) == [(1, 10), (2, 30)]
    assert (mine.logprobs, mine.started, mine.queued, len(mine.finished)) == ([], [], [], 1)
    assert tokens_of(theirs) == [(other + 1, 20)]
    assert (theirs.logprobs, theirs.started, theirs.finished) == ([(other + 1, logprobs)], [(other + 1, 0)], [])
    assert theirs.queued == [(other + 1, 0.5)]


def test_a_refusal_reaches_its_client():
    mailbox = Mailbox()
    mailbox.refuse(5, "too long")
    (finished,) = next_batch(mailbox.outputs(0)).finished
    assert (finished.seq_id, finished.finish_reason, finished.stop_reason) == (5, "error", "too long")


def test_closing_the_mailbox_flushes_and_ends_streams_and_fails_calls():
    mailbox = Mailbox()
    call = Utility("anything", (), {})
    mailbox.put(call)
    mailbox.publish(step([1], [10], interval=60.0), LOAD)
    mailbox.close()
    assert len(list(mailbox.outputs(0))) == 1
    with pytest.raises(EngineDeadError, match="anything"):
        call.reply.result(0)


def test_the_output_stream_of_a_forgotten_client_ends_and_stays_ended():
    mailbox = Mailbox()
    gone, other = 3, 4
    stream = mailbox.outputs(gone)
    mailbox.publish(step([first_seq_id(gone), first_seq_id(other)], [1, 2]), LOAD)
    assert len(tokens_of(next_batch(stream))) == 1
    mailbox.forget_client(gone)
    assert next(stream, None) is None
    assert next(mailbox.outputs(gone), None) is None
    # nothing is kept for it, also not of a step that has preempted one of its requests before
    mailbox.publish(StepOutputs(preempted=[(first_seq_id(gone),)]), LOAD)
    mailbox.refuse(first_seq_id(gone), "why")
    mailbox.ask_for_features(first_seq_id(gone), ["image"])
    assert list(mailbox.flush()) == [other]
    assert mailbox.is_forgotten(first_seq_id(gone) + 5)
    assert not mailbox.is_forgotten(first_seq_id(other))
    assert len(tokens_of(next_batch(mailbox.outputs(other)))) == 1


def test_a_client_that_has_disconnected_may_have_another_stream():
    mailbox = Mailbox()
    stream = mailbox.outputs(0)
    mailbox.publish(step([1], [10], finished=[FinishedRequest(1, "length")]), LOAD)
    assert tokens_of(next_batch(stream)) == [(1, 10)]
    assert mailbox.flush() == {0: 1}
    mailbox.forget_client(0, is_gone=False)
    assert next(stream, None) is None
    assert mailbox.flush() == {}, "nothing is kept for it, as it may never come back"
    assert not mailbox.is_forgotten(2)
    mailbox.publish(step([2], [20], finished=[FinishedRequest(2, "length")]), LOAD)
    assert mailbox.flush() == {0: 1}
    assert tokens_of(next_batch(mailbox.outputs(0, 1))) == [(2, 20)]


def test_a_stream_that_begins_after_its_client_has_left_ends():
    mailbox = Mailbox()
    mailbox.forget_client(0, is_gone=False, connection=1)
    mailbox.publish(step([2], [20], finished=[FinishedRequest(2, "length")]), LOAD)
    assert next(mailbox.outputs(0, 1), None) is None
    assert tokens_of(next_batch(mailbox.outputs(0, 2))) == [(2, 20)]


def test_a_connection_gets_nothing_before_the_earlier_one_was_left(monkeypatch):
    monkeypatch.setattr("raycore.engine.mailbox.IDLE_CHECK_S", 0.001)
    mailbox = Mailbox()
    first, second = mailbox.outputs(0, 1), mailbox.outputs(0, 2)
    mailbox.publish(step([1], [10], finished=[FinishedRequest(1, "length")]), LOAD)
    assert tokens_of(next_batch(first)) == [(1, 10)]
    mailbox.publish(
        step([1], [11], finished=[FinishedRequest(1, "length")]),
        msgspec.structs.replace(LOAD, num_waiting=LOAD.num_waiting + 1),
    )
    assert tokens_of(next_batch(second)) == []
    mailbox.forget_client(0, is_gone=False, connection=1)
    mailbox.publish(step([2], [20], finished=[FinishedRequest(2, "length")]), LOAD)
    assert next(first, None) is None
    assert tokens_of(next_batch(second)) == [(2, 20)]
    mailbox.close()
    assert next(second, None) is None


def test_an_output_batch_tells_the_tokens_age_and_duration_of_each_step():
    mailbox = Mailbox()
    mailbox.publish(step([1, 2], [10, 20], interval=60.0), LOAD)
    time.sleep(0.05)
    mailbox.publish(step([1], [11], duration_s=0.25, finished=[FinishedRequest(1, "length")]), LOAD)
    (first, first_age_s, _), (second, second_age_s, duration_s) = next_batch(mailbox.outputs(0)).steps
    assert (first, second) == (2, 1)
    assert first_age_s - second_age_s >= 0.05
    assert second_age_s >= 0
    assert duration_s == 0.25


@pytest.fixture
def frequent_checks(monkeypatch):
    monkeypatch.setattr("raycore.engine.mailbox.IDLE_CHECK_S", 0.01)


def test_a_client_without_requests_is_sent_a_load_that_changes(frequent_checks):
    mailbox = Mailbox()
    other = mailbox.outputs(1)
    mailbox.publish(step([1], [10]), LoadView(50, 8, 0.9))
    batch = next_batch(other)
    assert (batch.load, tokens_of(batch), batch.steps) == (LoadView(50, 8, 0.9), [], [])
    mailbox.publish(step([1], [11]), LoadView(0, 1, 0.1))
    assert next_batch(other).load == LoadView(0, 1, 0.1)
    mailbox.note_load(LoadView(0, 0, 0.0))
    assert next_batch(other).load == LoadView(0, 0, 0.0), "also one that changes without an output"


def test_a_load_that_a_client_knows_is_not_sent_again(frequent_checks):
    mailbox = Mailbox()
    mailbox.publish(step([1], [10], finished=[FinishedRequest(1, "stop")]), LoadView(0, 1, 0.25))
    stream = mailbox.outputs(0)
    assert next_batch(stream).load == LoadView(0, 1, 0.25)
    mailbox.note_load(LoadView(0, 1, 0.5, num_preemptions=3))  # the same number of requests
    rest: list[bytes] = []
    reader = threading.Thread(target=lambda: rest.extend(stream))
    reader.start()
    reader.join(0.2)  # some twenty checks
    mailbox.close()
    reader.join(LONG_S)
    assert rest == []


def test_every_batch_has_the_newest_load():
    mailbox = Mailbox()
    mailbox.publish(step([1], [10]), LoadView(3, 1, 0.25, num_preemptions=2))
    other = first_seq_id(1)
    mailbox.refuse(other, "too long")
    assert next_batch(mailbox.outputs(1)).load.num_preemptions == 2, "a count never falls"


def test_with_more_ranks_each_sends_its_load_alone_more_rarely(monkeypatch):
    waited_s: list[float] = []

    def take(outbox, connection, timeout_s):
        waited_s.append(timeout_s)
        outbox.closed = True

    monkeypatch.setattr("raycore.engine.mailbox._Outbox.take", take)
    for num_ranks in (1, 200, 1000):
        assert list(Mailbox(num_ranks).outputs(0)) == []
    assert waited_s == [1.0, 1.0, 5.0]
