"""Where a server can't listen is refused, and why, before an engine starts."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from raycore.errors import InvalidConfig
from raycore.server.process.listening import listen, reserve


@pytest.mark.parametrize("open_socket", [listen, reserve])
def test_a_port_in_use_is_refused_naming_the_flag(open_socket):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            InvalidConfig, match=rf"can't listen on 127\.0\.0\.1:{port}: Address already in use \(.*--port"
        ):
            open_socket("127.0.0.1", port)


@pytest.mark.parametrize("host", ["nosuch.invalid", "a..b", "x" * 70, "[::1]"])
@pytest.mark.parametrize("open_socket", [listen, reserve])
def test_a_host_that_cannot_be_resolved_is_refused(open_socket, host):
    with pytest.raises(InvalidConfig, match="the host can't be resolved") as raised:
        open_socket(host, 0)
    assert host in str(raised.value)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(InvalidConfig, match=r"can't listen on 192\.0\.2\.1:0: .*no interface of this machine"):
        listen("192.0.2.1", 0)


def test_a_port_without_permission_is_refused(monkeypatch):
    def refuse(self, address):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(InvalidConfig, match=r"can't listen on 127\.0\.0\.1:80: Permission denied \(.*below 1024"):
        listen("127.0.0.1", 80)


def test_an_address_of_ipv6_is_shown_in_brackets():
    with pytest.raises(InvalidConfig, match=r"on \[2001:db8::1\]:0: "):
        listen("2001:db8::1", 0)
