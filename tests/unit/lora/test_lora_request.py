"""A request's adapter is checked when it is named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from raycore.errors import InvalidRequest
from raycore.lora.request import LoRARequest


def test_a_lora_request_is_equal_after_encoding_and_decoding() -> None:
    request = LoRARequest("sql", 3, "/adapters/sql", load_inplace=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=LoRARequest) == request
    assert not LoRARequest("sql", 1, "/adapters/sql").load_inplace


def test_fields_have_vllms_order_and_those_without_effect_make_no_other_adapter() -> None:
    request = LoRARequest("sql", 3, "/adapters/sql", "llama", False, True)
    plain = LoRARequest("sql", 3, "/adapters/sql")
    assert (request.base_model_name, request.is_3d_lora_weight) == ("llama", True)
    assert request == plain
    assert not (request != plain)  # noqa: SIM202 - an operator of its own
    assert hash(request) == hash(plain)
    assert plain != LoRARequest("sql", 3, "/adapters/sql", load_inplace=True)
    assert (request.name, request.adapter_id, request.path) == ("sql", 3, "/adapters/sql")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_name": ""}, "lora_name='': expected a string"),
        ({"lora_name": 1}, "lora_name=1: expected a string"),
        ({"lora_name": "\ud800"}, r"lora_name='\\ud800': expected a string"),
        ({"lora_int_id": 0}, "lora_int_id=0: expected an integer from 1"),
        ({"lora_int_id": -1}, "lora_int_id=-1: expected an integer from 1"),
        ({"lora_int_id": True}, "lora_int_id=True: expected an integer"),
        ({"lora_int_id": 1.0}, r"lora_int_id=1\.0: expected an integer"),
        ({"lora_int_id": "x" * 1_000_000}, r"… \(1000002 characters\): expected an integer"),
        ({"lora_int_id": 1 << 63}, "lora_int_id=9223372036854775808: expected an integer from 1"),
        ({"lora_path": ""}, "lora_path='': expected a string"),
        ({"lora_path": None}, "lora_path=None: expected a string"),
        ({"load_inplace": 1}, "load_inplace=1: expected True or False"),
        ({"base_model_name": 1}, "base_model_name=1: expected a string"),
        ({"is_3d_lora_weight": None}, "is_3d_lora_weight=None: expected True or False"),
    ],
    ids=range(14),
)
def test_wrong_values_of_a_lora_request_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        LoRARequest(**({"lora_name": "sql", "lora_int_id": 1, "lora_path": "/adapters/sql"} | changes))
