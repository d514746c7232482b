"""Requests are decoded together, and one that can't be decoded fails alone."""

import msgspec
import pytest
from fake_executor import request

from raycore.engine.decoding import decode_requests


def test_decoded_requests_equal_the_encoded_ones():
    requests = [request(0), request(1)]
    assert decode_requests(msgspec.msgpack.encode(requests)) == (requests, [])


def test_a_request_that_cannot_be_decoded_is_named_with_the_reason():
    broken = msgspec.structs.replace(request(1), priority="high")
    decoded, undecodable = decode_requests(msgspec.msgpack.encode([request(0), broken, request(2)]))
    assert [each.seq_id for each in decoded] == [0, 2]
    ((seq_id, reason),) = undecodable
    assert seq_id == 1
    assert "Expected `int`, got `str`" in reason


def test_a_message_that_is_no_list_of_requests_is_an_error():
    with pytest.raises(msgspec.DecodeError):
        decode_requests(b"\xc1")
