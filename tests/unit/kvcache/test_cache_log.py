"""What clients are told of a rank's prefix cache."""

from __future__ import annotations

import random

import msgspec
import pytest
from overtaking import overtake

from raycore.client.held_prefixes import HeldPrefixes
from raycore.engine.mailbox import Mailbox
from raycore.kvcache import cache_log
from raycore.kvcache.cache_log import CacheLog
from raycore.messages import CacheChanges, OutputBatch


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_a_client_is_told_what_is_new_to_it():
    log = CacheLog()
    assert log.since(-1) == (None, 0)
    log.stored([digest(1), digest(2)])
    changes, position = log.since(-1)
    assert changes == CacheChanges(digest(1) + digest(2), is_whole=True)
    assert log.since(position) == (None, position)
    log.removed([digest(1)])
    log.stored([digest(3), digest(4)])
    log.removed([digest(4)])
    changes, position = log.since(position)
    assert changes == CacheChanges(digest(3), digest(1) + digest(4))
    log.cleared()
    log.stored([digest(5)])
    assert log.since(position) == (CacheChanges(digest(5), is_whole=True), log.since(-1)[1])


def test_clients_ask_for_what_the_present_weights_have_computed():
    log, held = CacheLog(), HeldPrefixes(4)
    found: list[list[bytes]] = []
    position = -1
    for identity in (b"one", b"two"):
        log.take_identity(identity)
        changes, position = log.since(position)
        assert changes == CacheChanges(is_whole=True, identity=identity)
        held.take(5, changes)
        found.append(held.keys(list(range(20))))
        log.stored(found[-1])
        changes, position = log.since(position)
        assert changes is not None
        held.take(5, changes)
        assert held.match_stored(found[-1]) == [(1 << 5, 16)]
    assert not set(found[0]) & set(found[1])
    assert held.match_stored(found[0]) == []


def test_a_client_is_never_told_of_old_blocks_as_if_the_present_weights_had_computed_them():
    log = CacheLog()
    log.take_identity(b"old")
    log.stored([digest(1)])
    told: list[CacheChanges | None] = []
    overtake(log, "_lock", lambda: told.append(log.since(-1)[0]))
    log.take_identity(b"new")
    assert told == [CacheChanges(digest(1), is_whole=True, identity=b"old")]
    assert log.since(-1)[0] == CacheChanges(b"", is_whole=True, identity=b"new")


def test_clients_know_what_is_held_however_far_behind_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_log, "_MAX_ENTRIES", 20)
    chance = random.Random(3)
    log, truth = CacheLog(), set[int]()
    clients = [(HeldPrefixes(1), -1) for _ in range(3)]
    for _ in range(2000):
        number = chance.randrange(40)
        if chance.random() < 0.01:
            log.cleared()
            truth.clear()
        elif number in truth:
            log.removed([digest(number)])
            truth.discard(number)
        else:
            log.stored([digest(number)])
            truth.add(number)
        index = chance.randrange(40)
        if index < len(clients):
            held, position = clients[index]
            changes, position = log.since(position)
            if changes is not None:
                held.take(5, changes)
            clients[index] = (held, position)
            assert {each for each in range(40) if held.match_stored([digest(each)]) == [(1 << 5, 1)]} == truth


def test_streams_say_what_has_changed_even_without_outputs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raycore.engine.mailbox.IDLE_CHECK_S", 0.01)
    mailbox = Mailbox()
    mailbox.cache_log = CacheLog()
    stream = mailbox.outputs(0)
    mailbox.cache_log.stored([digest(1)])
    assert msgspec.msgpack.decode(next(stream), type=OutputBatch).cache == CacheChanges(digest(1), is_whole=True)
    mailbox.cache_log.removed([digest(1)])
    assert msgspec.msgpack.decode(next(stream), type=OutputBatch).cache == CacheChanges(removed=digest(1))
    mailbox.close()
    assert list(stream) == []
