"""A client of a rank: takes its outputs, and keeps what each request has got."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from raycore.messages import (
    FIRST_WEIGHTS,
    EngineRequest,
    OutputBatch,
    Pooled,
    TokenLogprobs,
    first_seq_id,
)
from raycore.system import threading
from simulation.engine.rank import Rank
from simulation.world.threads import world


@dataclass
class Record:
    """A request, and what its client has got of it."""

    request: EngineRequest
    """With the data of all features."""
    is_aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """By token: the number of its weights."""
    num_started: int = 0
    finish_reason: str | None = None
    detail: object = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)


class Client:
    """See the module."""

    def __init__(self, rank: Rank, index: int) -> None:
        self.index = index
        self.records: dict[int, Record] = {}
        self.problems: list[str] = []
        """What no client may ever see."""
        self._rank = rank
        self._next_seq_id = first_seq_id(index)
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        """Held while messages are sent whose order counts."""
        self._threads: list[threading.Thread] = []
        self.is_gone = False

    def connect(self) -> None:
        """Begin to take outputs."""
        number = len(self._threads)
        thread = threading.Thread(target=self._read, args=[number], name=f"outputs-{self.index}-{number}")
        self._threads.append(thread)
        thread.start()

    def submit(self, requests: list[EngineRequest], *, without_data: bool = False) -> list[Record]:
        """Send requests in one message. `without_data`: leave out what features are encoded from."""
        for request in requests:
            request.seq_id, self._next_seq_id = self._next_seq_id, self._next_seq_id + 1
        records = [Record(request) for request in requests]
        sent = [
            msgspec.structs.replace(each, feature_data=[None] * len(each.features)) if without_data else each
            for each in requests
        ]
        with self._sending:
            with self._changed:
                self.records |= {record.request.seq_id: record for record in records}
                for record in records:
                    record.is_aborted = self.is_gone
            self._rank.submit(sent)
        return records

    def abort(self, records: list[Record]) -> None:
        """Abort those of the requests that haven't ended."""
        with self._changed:
            left = [each for each in records if each.finish_reason is None]
            for record in left:
                record.is_aborted = True
            self._changed.notify_all()
        self._rank.abort([each.request.seq_id for each in left])

    def disconnect(self, *, is_gone: bool) -> None:
        """Leave, for ever or to come back at once. All requests are aborted."""
        with self._sending:
            with self._changed:
                self.is_gone = is_gone
                for record in self.records.values():
                    record.is_aborted = record.is_aborted or record.finish_reason is None
                self._changed.notify_all()
            self._rank.forget(self.index, len(self._threads) - 1, is_gone=is_gone)
            if not is_gone:
                self.connect()

    def wait(self, records: list[Record], timeout_s: float) -> bool:
        """Wait until requests have ended. Returns whether all have."""

        def is_over() -> bool:
            has_ended = all(each.finish_reason is not None or each.is_aborted for each in records)
            return has_ended or self._rank.failure is not None

        with self._changed:
            return self._changed.wait_for(is_over, timeout_s)

    def _read(self, connection: int) -> None:
        for data in self._rank.mailbox.outputs(self.index, connection):
            batch = msgspec.msgpack.decode(data, type=OutputBatch)
            if connection < len(self._threads) - 1:
                continue  # as of a rank that the client has left
            with self._changed:
                self._take(batch)
                self._changed.notify_all()

    def _take(self, batch: OutputBatch) -> None:
        for seq_id, _ in batch.started:
            self._record(seq_id, "a start").num_started += 1
        versions, version = dict(batch.versions), FIRST_WEIGHTS
        pairs = zip(np.frombuffer(batch.seq_ids, np.int64), np.frombuffer(batch.token_ids, np.int32), strict=True)
        for index, (seq_id, token) in enumerate(pairs):
            version = versions.get(index, version)
            record = self._record(int(seq_id), f"the token {token}")
            record.tokens.append(int(token))
            record.versions.append(version.number)
        for seq_id, entry in batch.logprobs:
            self._record(seq_id, "a logprob").logprobs.append(entry)
        for seq_id, first, entries in batch.prompt_logprobs:
            record = self._record(seq_id, "prompt logprobs")
            if first != len(record.prompt_logprobs) + 1:
                self.problems.append(f"{seq_id}: prompt logprobs from {first} on after {len(record.prompt_logprobs)}")
            record.prompt_logprobs += entries
        for seq_id, result in batch.pooled:
            self._record(seq_id, "a result").pooled.append(result)
        for end in batch.finished:
            record = self._record(end.seq_id, f"the end {end.finish_reason!r}")
            record.finish_reason, record.detail = end.finish_reason, end.stop_reason
            world().tell(f"{end.seq_id} ends by {end.finish_reason} with {record.tokens}")
        for seq_id, identifiers in batch.missing_features:
            record = self._record(seq_id, "a wish for features")
            missing = [each for each in identifiers if each not in [own.identifier for own in record.request.features]]
            if missing:
                self.problems.append(f"{seq_id}: asked for {missing}, which it doesn't have")
            if not record.is_aborted:
                self._rank.submit([record.request])

    def _record(self, seq_id: int, what: str) -> Record:
        record = self.records.get(seq_id)
        if record is None:
            self.problems.append(f"{seq_id}: {what} for a request of another client")
            return Record(EngineRequest(seq_id, "?", [], None, 0))  # type: ignore[arg-type]
        if record.finish_reason is not None:
            self.problems.append(f"{seq_id}: {what} after the end")
        return record
