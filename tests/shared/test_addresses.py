"""What a service tells others of where it listens."""

from __future__ import annotations

import socket

import pytest

from shared import addresses
from shared.addresses import advertised, host_of, own_address


def test_an_address_of_one_host_stays_as_it_is():
    assert advertised("tcp://10.1.2.3:5555") == "tcp://10.1.2.3:5555"
    assert host_of("tcp://10.1.2.3:5555") == "10.1.2.3"


@pytest.mark.parametrize("anywhere", ["0.0.0.0", "*", "[::]"])
def test_a_socket_bound_to_any_address_tells_one_that_can_be_connected_to(anywhere):
    with socket.create_server(("0.0.0.0", 0)) as listening:
        port = listening.getsockname()[1]
        found = advertised(f"tcp://{anywhere}:{port}")
        assert found.endswith(f":{port}") and anywhere not in found
        socket.create_connection((host_of(found), port), timeout=5).close()


def test_the_way_to_this_host_is_loopback():
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_a_host_without_a_router_tells_the_address_of_its_interface_and_one_without_a_network_loopbacks(monkeypatch):
    class Unrouted(socket.socket):
        def connect(self, address):
            raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "socket", Unrouted)
    found = own_address("192.0.2.1")
    of_interfaces = list(addresses._of_interfaces(Unrouted(socket.AF_INET, socket.SOCK_DGRAM)))
    assert found == next((a for a in of_interfaces if not a.startswith("127.")), "127.0.0.1")
    assert "127.0.0.1" in of_interfaces
    socket.create_server((found, 0)).close()
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "not-there")])
    assert own_address("192.0.2.1") == "127.0.0.1"
