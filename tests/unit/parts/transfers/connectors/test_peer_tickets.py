"""What engines tell each other through callers: nobody else can read, change or invent it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from configs import make_config
from msgspec.structs import replace

from raycore.config import EngineConfig
from raycore.errors import InvalidConfig, InvalidRequest
from raycore.parts.transfers.client.params import params_check
from raycore.parts.transfers.config.kv_transfer import CONNECTORS, KVTransferConfig
from raycore.parts.transfers.connectors.connector import connector_class
from raycore.parts.transfers.connectors.peers.hints import RemoteBlocks
from raycore.parts.transfers.connectors.peers.tickets import CallerParams, Tickets, read_caller_params, tickets_of
from raycore.parts.transfers.values import PARAMS
from raycore.sampling_params import SamplingParams

SECRET = b"0123456789abcdef"
REMOTE = RemoteBlocks(["an address with a token"], 32, "lease", True, "prefill", "ab")


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_bytes(SECRET + b"\n")
    return str(path)


def config_with(connector: str = "DisaggregationConnector", role: str = "kv_both", **settings: Any) -> EngineConfig:
    engine_id = settings.pop("engine_id", None)
    transfer = KVTransferConfig(CONNECTORS[connector], role, engine_id, settings)  # pyright: ignore[reportArgumentType]
    made = make_config()
    return replace(made, kv_transfer_config=transfer, cache=replace(made.cache, enable_prefix_caching=True))


def check(config: EngineConfig, params: dict[str, Any]) -> None:
    params_check(config)(SamplingParams(extra_args={PARAMS: params}))


def told(**changed: Any) -> dict[str, Any]:
    ticket = Tickets(SECRET).seal(REMOTE)
    return {"do_remote_prefill": True, "remote_engine_id": "prefill", "remote_ticket": ticket} | changed


def test_a_ticket_says_what_was_sealed_and_shows_none_of_it() -> None:
    one, other = Tickets(SECRET), Tickets(SECRET)
    ticket = one.seal(REMOTE)
    assert other.open(ticket) == REMOTE
    assert ticket != one.seal(REMOTE)
    assert b"address" not in base64.b64decode(ticket)


def test_a_ticket_that_was_changed_or_invented_is_refused() -> None:
    tickets = Tickets(SECRET)
    data = bytearray(base64.b64decode(tickets.seal(REMOTE)))
    forged = [bytes(data[:place]) + bytes([data[place] ^ 1]) + bytes(data[place + 1 :]) for place in range(len(data))]
    forged += [bytes(data[:-1]), bytes(data) + b"a", bytes(16), b""]
    for each in forged:
        with pytest.raises(ValueError, match="remote_ticket"):
            tickets.open(base64.b64encode(each).decode())
    for text in ("", "no base64!", Tickets(b"another secret..").seal(REMOTE)):
        with pytest.raises(ValueError, match="remote_ticket"):
            tickets.open(text)


def test_vllms_proxies_send_keys_without_values() -> None:
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
    assert read_caller_params(asked) == CallerParams(do_remote_decode=True)
    assert read_caller_params(None) == CallerParams()


def test_requests_with_a_ticket_run(secret_file: str) -> None:
    config = config_with(secret_file=secret_file)
    for params in ({}, {"do_remote_decode": True}, told(), told(remote_engine_id=None), told(do_remote_decode=True)):
        check(config, params)


@pytest.mark.parametrize(
    ("role", "params", "words"),
    [
        ("kv_both", {"do_remote_prefill": True}, "remote_ticket is none"),
        ("kv_both", told(remote_ticket="forged"), "remote_ticket is none"),
        ("kv_both", told(remote_ticket=Tickets(b"another secret..").seal(REMOTE)), "remote_ticket is none"),
        ("kv_both", told(remote_engine_id="other"), "remote_engine_id='other'"),
        ("kv_both", told(remote_host="10.0.0.7"), "`remote_host`; known are do_remote_decode"),
        ("kv_both", told(workers=["an address"]), "`workers`"),
        ("kv_both", {"do_remote_decode": "yes"}, "do_remote_decode"),
        ("kv_producer", told(), "do_remote_prefill: .*kv_producer"),
        ("kv_consumer", {"do_remote_decode": True}, "do_remote_decode: .*kv_consumer"),
    ],
)
def test_other_params_are_refused(secret_file: str, role: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check(config_with(role=role, secret_file=secret_file), params)


@pytest.mark.parametrize("params", [{"do_remote_decode": True}, told()])
def test_engines_without_a_secret_hand_over_nothing(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="secret_file"):
        check(config_with(), params)


@pytest.mark.parametrize(
    ("connector", "settings", "words"),
    [
        ("DisaggregationConnector", {"secret_file": "missing"}, "secret_file='missing' can't be read"),
        ("DisaggregationConnector", {"role": "kv_producer"}, "kv_role='kv_producer' .* secret_file"),
        ("DisaggregationConnector", {"engine_id": "a"}, "engine_id='a' .* secret_file"),
        ("DisaggregationConnector", {"role": "kv_consumer", "num_prefill_ranks": 1}, "num_prefill_ranks=1"),
        ("PeersConnector", {"role": "kv_producer"}, "kv_role='kv_producer' is for several engines"),
        ("PeersConnector", {"engine_id": "a"}, "engine_id='a' is for several engines"),
        ("OffloadConnector", {"engine_id": "a", "cpu_bytes_to_use": 1}, "engine_id='a' names an engine"),
    ],
)
def test_settings_without_effect_are_refused(connector: str, settings: dict[str, Any], words: str) -> None:
    config = config_with(connector, **settings)
    with pytest.raises(InvalidConfig, match=words):
        connector_class(config).check(config)


def test_a_secret_is_not_too_short(tmp_path: Path, secret_file: str) -> None:
    config = config_with(role="kv_producer", engine_id="a", secret_file=secret_file)
    connector_class(config).check(config)
    assert tickets_of(secret_file).open(Tickets(SECRET).seal(REMOTE)) == REMOTE
    short = tmp_path / "short"
    short.write_bytes(SECRET[:-1] + b"\n")
    with pytest.raises(InvalidConfig, match="15 bytes, fewer than 16"):
        tickets_of(str(short))
