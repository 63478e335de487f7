"""Where ranks meet: a free port on the machine of rank 0, and the interface that the others reach it by."""

from __future__ import annotations

import socket

import pytest

from headway.trainers.sharded.rank_host import Rendezvous, _list_interfaces, find_network_interface


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.7"])
def test_rank_0_listens_where_it_was_told_and_nowhere_else(host: str) -> None:
    first, second = Rendezvous(0, 2), Rendezvous(0, 2)
    addresses = [first.open(host), second.open(host)]
    assert addresses[0] != addresses[1], "every meeting has a port of its own"
    for address in addresses:
        where, _, port = address.rpartition(":")
        assert where == host
        socket.create_connection((host, int(port)), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.9", int(port)), timeout=5)


def test_ranks_speak_over_the_interface_that_has_the_address() -> None:
    loopback = find_network_interface("127.0.0.1")
    assert loopback and find_network_interface("127.0.0.7") == loopback
    for name, address in _list_interfaces():
        assert find_network_interface(str(address)) == name
    assert find_network_interface("203.0.113.1") == "" == find_network_interface("a-name"), (
        "nobody here has it: the library chooses"
    )
