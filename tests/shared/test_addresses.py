"""What a service tells others of where it listens."""

from __future__ import annotations

import socket

import pytest

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
