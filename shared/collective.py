"""Groups for collective broadcasts, which are made and given up as members come and go.

torch.distributed's default group is one a process and for good. These stand beside it: each has an epoch, whose name
keeps its rendezvous apart from those before it, and a deadline for every transfer. torch is imported when one is made.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import numpy as np

from shared.addresses import own_address
from shared.errors import BrokenTransfer

Backend = Literal["gloo", "nccl"]
IN_FLIGHT = 2
"""Pieces on their way at once: while one is checked the next one is received."""

CONNECT_TRIES = 5
"""Timeouts that gloo may wait, one after the other, for a member that does not let itself be connected to."""


class Rendezvous:
    """Where the members of all epochs find each other: a store in this process, on `host` alone. port: where."""

    def __init__(self, host: str) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.host = host
        with socket.create_server((host, 0)) as listening:
            self.port: int = listening.getsockname()[1]
            self._store = TCPStore(
                host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )


class Group:
    """One member's end of an epoch. Rank 0 sends, all others receive."""

    def __init__(self, backend: Backend, at: tuple[str, int], epoch: str, rank: int, size: int, deadline_s: float):
        """Wait until all members are there. In a thread.

        at: host and port of the Rendezvous. deadline_s: without a byte for so long, a transfer is given up. Raises
        BrokenTransfer where the members do not find each other by then.
        """
        import torch.distributed as dist
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        self.epoch = epoch
        self._is_root = rank == 0
        deadline = timedelta(seconds=deadline_s)
        with _as_broken(f"the {backend} group of epoch {epoch} could not be made"):
            store = PrefixStore(epoch, TCPStore(*at, is_master=False, timeout=deadline))
            self._group: Any = _MAKE[backend](store, rank, size, at, deadline)
        self._staging = backend == "nccl"
        self._how = dist.BroadcastOptions()
        self._how.rootRank = self._how.rootTensor = 0
        self._how.timeout = timedelta(seconds=deadline_s)

    def broadcast(self, pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Send these u1 arrays, or receive into them; gives each back once that is done. In a thread.

        Raises BrokenTransfer where a member is gone or no byte comes in time; nobody may use the group after that.
        """
        import torch

        on_their_way: deque[tuple[np.ndarray, Any, Any]] = deque()
        with _as_broken(f"the transfer of epoch {self.epoch} broke off"):
            for piece in pieces:
                tensor = torch.from_numpy(piece)
                if self._staging:
                    tensor = tensor.cuda() if self._is_root else torch.empty_like(tensor, device="cuda")
                on_their_way.append((piece, tensor, self._group.broadcast([tensor], self._how)))
                if len(on_their_way) == IN_FLIGHT:
                    yield self._arrived(*on_their_way.popleft())
            while on_their_way:
                yield self._arrived(*on_their_way.popleft())

    def _arrived(self, piece: np.ndarray, tensor: Any, work: Any) -> np.ndarray:
        work.wait()
        if self._staging and not self._is_root:
            piece[:] = tensor.cpu().numpy()
        return piece

    def close(self) -> None:
        """Let go of the other members, also in the middle of a transfer."""
        self._group.abort()
        self._group = None


def _make_gloo(store: Any, rank: int, size: int, at: tuple[str, int], deadline: timedelta) -> Any:
    from torch.distributed import BarrierOptions, ProcessGroupGloo

    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = deadline / CONNECT_TRIES
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    where = {"interface": interface} if interface else {"hostname": own_address(at[0])}
    options._devices = [ProcessGroupGloo.create_device(**where)]
    group: Any = ProcessGroupGloo(store, rank, size, options)
    all_connected = BarrierOptions()  # what is sent before breaks the connections of those that are not
    all_connected.timeout = deadline
    group.barrier(all_connected).wait()
    return group


def _make_nccl(store: Any, rank: int, size: int, _: tuple[str, int], deadline: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = deadline
    return ProcessGroupNCCL(store, rank, size, options)


_MAKE = {"gloo": _make_gloo, "nccl": _make_nccl}


@contextmanager
def _as_broken(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, ImportError) as error:  # the last: torch was built without the backend
        reason = str(error).splitlines()[0][:200]
        raise BrokenTransfer(f"{what}: {reason}") from None
