"""Groups for broadcasts, between real processes."""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
import pytest
import torch

from shared.collective import Group, Rendezvous
from shared.errors import BrokenTransfer

SPAWN = multiprocessing.get_context("spawn")
MIB = 1 << 20


def pieces(version):
    """What rank 0 sends: of several sizes, one of them empty."""
    random = np.random.default_rng(version)
    return [random.integers(0, 256, size, dtype="u1") for size in (3 * MIB, 0, 1, 5 * MIB + 7)]


def receive(backend, port, rank, size, told):
    """A member's process: two versions in one group, then one in another."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    torch.set_num_threads(1)
    right = []
    for epoch, versions in (("first", (0, 1)), ("second", (2,))):
        group = Group(backend, ("127.0.0.1", port), epoch, rank, size, 60.0)
        for version in versions:
            into = [np.zeros_like(piece) for piece in pieces(version)]
            arrived = list(group.broadcast(into))
            right.append(all(np.array_equal(a, b) for a, b in zip(arrived, pieces(version), strict=True)))
        group.close()
    told.send(right)


NCCL = pytest.mark.skipif(
    torch.cuda.device_count() < 3, reason="needs three GPUs: pytest tests/shared/test_collective.py on such a host"
)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=NCCL)])
def test_all_members_receive_what_is_sent_also_in_the_next_epoch(backend):
    rendezvous = Rendezvous("127.0.0.1")
    hears, tells = SPAWN.Pipe(duplex=False)
    members = [SPAWN.Process(target=receive, args=(backend, rendezvous.port, rank, 3, tells)) for rank in (1, 2)]
    for member in members:
        member.start()
    for epoch, versions in (("first", (0, 1)), ("second", (2,))):
        group = Group(backend, ("127.0.0.1", rendezvous.port), epoch, 0, 3, 60.0)
        for version in versions:
            assert sum(piece.nbytes for piece in group.broadcast(pieces(version))) == 8 * MIB + 8
        group.close()
    assert [hears.recv(), hears.recv()] == [[True] * 3] * 2
    for member in members:
        member.join()


def test_a_group_without_its_members_is_given_up():
    rendezvous = Rendezvous("127.0.0.1")
    with pytest.raises(BrokenTransfer, match="the gloo group of epoch lonely could not be made"):
        Group("gloo", ("127.0.0.1", rendezvous.port), "lonely", 0, 2, 1.0)
