"""Addresses of sockets: which one of this host others can use."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator

ANY_HOST = ("0.0.0.0", "*", "[::]")
_ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737). Nothing is sent to it."""
_LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


def host_of(address: str) -> str:
    """The host in `tcp://host:port`."""
    return address.removeprefix("tcp://").rpartition(":")[0]


def advertised(bound: str) -> str:
    """An address that others can connect to: that of a socket bound to any, with this host's own in its place."""
    host, port = host_of(bound), bound.rpartition(":")[2]
    return f"tcp://{own_address(_ELSEWHERE)}:{port}" if host in ANY_HOST else bound


def own_address(towards: str) -> str:
    """The IPv4 address of this host on the way to another one.

    Where there is no way, as on a network without a router, that of its first interface; loopback's where it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError:
            return next((found for found in _of_interfaces(probe) if not found.startswith("127.")), _LOOPBACK)
        return str(probe.getsockname()[0])


def _of_interfaces(any_socket: socket.socket) -> Iterator[str]:
    """The first IPv4 address of each interface that has one."""
    for _, name in socket.if_nameindex():
        try:  # the answer is an ifreq: 16 bytes of name, then a sockaddr_in, whose address is its bytes 4 to 8
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
        except OSError:
            continue
        yield socket.inet_ntoa(answer[20:24])
