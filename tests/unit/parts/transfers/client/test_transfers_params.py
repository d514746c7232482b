"""What callers tell a KV connector is checked before it is sent, and what it tells comes with each sequence."""

from __future__ import annotations

from typing import Any

import pytest
from configs import make_config
from msgspec.msgpack import encode
from msgspec.structs import replace

from raycore.client.output_parts import make_output_parts
from raycore.config import EngineConfig
from raycore.errors import InvalidRequest
from raycore.messages import TokenReport
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.parts.transfers.client.params import ConnectorParams, params_check
from raycore.parts.transfers.config.kv_transfer import CONNECTORS, KVTransferConfig
from raycore.parts.transfers.values import PARAMS
from raycore.sampling_params import SamplingParams

OWN = "answering_connector.AnsweringConnector"


def config_with(connector: str | None) -> EngineConfig:
    transfer = None if connector is None else KVTransferConfig(connector)
    return replace(make_config(), kv_transfer_config=transfer)


def check(connector: str | None, told: Any) -> None:
    params_check(config_with(connector))(SamplingParams(extra_args={"other": 1} if told is None else {PARAMS: told}))


@pytest.mark.parametrize("connector", [None, OWN, *CONNECTORS.values()])
def test_requests_that_tell_nothing_run_everywhere(connector: str | None) -> None:
    check(connector, None)
    check(connector, {})


@pytest.mark.parametrize(
    ("connector", "told", "words"),
    [
        (None, {"a": 1}, "needs an engine with a KV connector"),
        (OWN, [1], "isn't a dict"),
        (OWN, {"bad": 1}, "bad isn't known here"),
        *((each, {"a": 1}, "omit them|unknown field `a`") for each in CONNECTORS.values()),
        *((each, {"do_remote_prefill": True}, "omit them|secret_file") for each in CONNECTORS.values()),
    ],
)
def test_what_nobody_reads_is_refused(connector: str | None, told: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{PARAMS}.*{words}"):
        check(connector, told)


def test_a_connector_of_the_users_gets_any_keys_also_those_of_raycores_own() -> None:
    check(OWN, {"do_remote_prefill": True, "remote_workers": ["x"], "deep": {"a": [1, None]}})


def test_each_sequence_has_what_was_told_of_it() -> None:
    addition = ConnectorParams().begin(SamplingParams(n=3))
    output = RequestOutput("a", None, [1], outputs=[CompletionOutput(index, "", []) for index in range(3)])
    addition.add_to(output)
    assert output.kv_transfer_params is None
    for index in (2, 1):
        addition.take(index, TokenReport(PARAMS, 4, 0, encode({"of": index})))
    addition.add_to(output)
    assert [each.kv_transfer_params for each in output.outputs] == [None, {"of": 1}, {"of": 2}]
    assert output.kv_transfer_params == {"of": 1}


def test_engines_without_a_connector_have_no_such_part() -> None:
    parts = [type(each) for each in make_output_parts(make_config())]
    assert ConnectorParams not in parts
    assert [type(each) for each in make_output_parts(config_with(OWN))] == [*parts, ConnectorParams]
