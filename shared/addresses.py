"""Addresses of sockets: which one of this host others can use."""

from __future__ import annotations

import socket

ANY_HOST = ("0.0.0.0", "*", "[::]")
_ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737). Nothing is sent to it."""


def host_of(address: str) -> str:
    """The host in `tcp://host:port`."""
    return address.removeprefix("tcp://").rpartition(":")[0]


def advertised(bound: str) -> str:
    """An address that others can connect to: that of a socket bound to any, with this host's own in its place."""
    host, port = host_of(bound), bound.rpartition(":")[2]
    return f"tcp://{own_address(_ELSEWHERE)}:{port}" if host in ANY_HOST else bound


def own_address(towards: str) -> str:
    """The IPv4 address of this host on the way to another one; loopback's where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
