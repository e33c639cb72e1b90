"""The ranks that train one policy together. Rank 0 is the learner service; the others do what it tells them.

What goes between them are tensors: msgpack and raw arrays as bytes, by the wire's own codec, and no pickled objects.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgpack
import numpy as np
import torch
import torch.distributed as dist

from services.compute.device import compute_device

T = TypeVar("T")

PATIENCE = timedelta(days=7)
"""Ranks wait as long as rank 0 has nothing to do. torchrun ends all when one has died; the broker watches progress."""


class Crew:
    """This process's place among the ranks. Alone, it has nobody to talk to and does all the work."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def join(cls) -> Crew:
        """The ranks that torchrun started, or this process alone where it did not."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        backend, device = "gloo", compute_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=PATIENCE)
        return cls(dist.get_rank(), size)

    def tell(self, order: str, columns: Sequence[Mapping[str, np.ndarray]] = (), **values: Any) -> None:
        """Rank 0: have the others carry out an order, while this rank does the same."""
        if self.size == 1 or self.rank > 0:
            return
        arrays = [[(name, array.dtype.str, array.shape) for name, array in group.items()] for group in columns]
        header = msgpack.packb({"order": order, "values": values, "arrays": arrays})
        body = b"".join(np.ascontiguousarray(array).tobytes() for group in columns for array in group.values())
        _broadcast(np.frombuffer(len(header).to_bytes(8, "little") + header + body, dtype="u1"))

    def orders(self) -> Iterator[tuple[str, list[dict[str, np.ndarray]], dict[str, Any]]]:
        """The other ranks: what rank 0 tells, until it tells to `leave`."""
        while True:
            data = _broadcast(None)
            start = 8 + int.from_bytes(data[:8].tobytes(), "little")
            header = msgpack.unpackb(data[8:start].tobytes())
            if header["order"] == "leave":
                return
            groups: list[dict[str, np.ndarray]] = []
            for described in header["arrays"]:
                group = {}
                for name, dtype, shape in described:
                    end = start + np.dtype(dtype).itemsize * int(np.prod(shape))
                    group[name] = data[start:end].copy().view(dtype).reshape(shape)
                    start = end
                groups.append(group)
            yield header["order"], groups, header["values"]

    def share(self, work: Sequence[T], weight: Sequence[int]) -> list[list[T]]:
        """The parts of all ranks in what all of them list alike, the heaviest first to whoever has least."""
        parts: list[list[T]] = [[] for _ in range(self.size)]
        loads = [0] * self.size
        for i in sorted(range(len(work)), key=lambda i: -weight[i]):
            least = loads.index(min(loads))
            parts[least].append(work[i])
            loads[least] += weight[i]
        return parts

    def gather(self, values: Mapping[str, float]) -> list[dict[str, float]]:
        """The numbers of all ranks, in their order, on all ranks."""
        if self.size == 1:
            return [dict(values)]
        own = np.frombuffer(msgpack.packb(dict(values)), dtype="u1")
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(own)]))
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = torch.from_numpy(own.copy())
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [msgpack.unpackb(part[: int(n)].numpy().tobytes()) for part, n in zip(parts, sizes, strict=True)]

    def leave(self) -> None:
        """The work is over."""
        if self.size > 1:
            if self.rank == 0:
                self.tell("leave")
            dist.destroy_process_group()


def _broadcast(data: np.ndarray | None) -> np.ndarray:
    """Send bytes from rank 0, or receive them there where `data` is None."""
    size = torch.tensor([0 if data is None else len(data)])
    dist.broadcast(size, 0)
    tensor = torch.empty(int(size), dtype=torch.uint8) if data is None else torch.from_numpy(data.copy())
    dist.broadcast(tensor, 0)
    return tensor.numpy()
