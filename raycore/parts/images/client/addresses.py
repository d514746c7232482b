"""Which network addresses images may be fetched from: public ones, so that no request can reach what only the server
reaches."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from raycore.errors import InvalidRequest
from raycore.system import Empty, SimpleQueue, Thread, socket

_IPV4_INSIDE = (
    # (network, bits after the IPv4 address inside an address of that network)
    (ip_network("::/96"), 0),
    (ip_network("::ffff:0:0/96"), 0),
    (ip_network("64:ff9b::/96"), 0),
    (ip_network("2002::/16"), 80),
)
"""IPv6 addresses that stand for IPv4 addresses: compatible, mapped, translated (NAT64) and 6to4."""
_TEREDO = ip_network("2001::/32")
_SPECIAL_IPV4 = (ip_network("192.0.0.0/24"), ip_network("192.88.99.0/24"))
"""Addresses of protocols, which Python's tables know only in part."""
_LOCAL_TRANSLATION = ip_network("64:ff9b:1::/48")


def is_public(address: str) -> bool:
    """Whether an IP address is one that anybody can reach, and nobody's own network."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address):
        if parsed in _TEREDO or parsed in _LOCAL_TRANSLATION:
            return False
        for network, shift in _IPV4_INSIDE:
            if parsed in network:
                return _is_public(IPv4Address(int(parsed) >> shift & 0xFFFFFFFF))
    return _is_public(parsed)


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if any(address in network for network in _SPECIAL_IPV4):
        return False
    is_special = address.is_multicast or address.is_reserved or address.is_unspecified or address.is_loopback
    return address.is_global and not (is_special or address.is_link_local or address.is_private)


def resolve(host: str, port: int, timeout_s: float) -> list[str]:
    """Return the IP addresses of a host.

    Raises:
        InvalidRequest: it has none, or the answer takes longer than `timeout_s` seconds.
    """
    answer: SimpleQueue[list[str] | OSError] = SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.put([str(entry[4][0]) for entry in found])
        except (OSError, UnicodeError) as error:
            answer.put(error if isinstance(error, OSError) else OSError(str(error)))

    # the system's resolver has no timeout, so it gets a thread that nobody has to wait for
    Thread(target=ask, daemon=True, name="raycore-resolver").start()
    try:
        found = answer.get(timeout=max(timeout_s, 0.001))
    except Empty:
        raise InvalidRequest(f"the address of {host} wasn't found in time") from None
    if isinstance(found, OSError):
        raise InvalidRequest(f"the host {host} has no address")
    return found
