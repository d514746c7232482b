"""Addresses as text."""

from __future__ import annotations

import pytest

from raycore.node.ports import joined, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:6379", ("localhost", 6379)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_an_address_has_a_host_and_a_port(text, address):
    assert parse_address(text) == address
    assert joined(*address) == text


@pytest.mark.parametrize(
    "text", ["", "localhost", ":6379", "host:", "host:0", "host:65536", "host:-1", "host:x", "host:²"]
)
def test_an_address_without_a_valid_host_and_port_is_refused(text):
    with pytest.raises(ValueError, match=r"isn't HOST:PORT with a port from 1 to 65535"):
        parse_address(text)
