"""What becomes of a micro-batch that does not fit into memory: it is halved and tried once more, or the error names it.

For all that compute with a model: the learner, critics and the reference.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from services.compute.packing import Row, halve
from shared.config import Learner, Reference, Training
from shared.errors import OutOfMemory
from shared.log import log

T = TypeVar("T")

_FAULTS = (MemoryError, RuntimeError)
_ON_CPU = "can't allocate memory"
"""What the allocator of torch says on a CPU, in a plain RuntimeError."""


class Room:
    """The memory that the micro-batches of one service are computed in.

    halved: how many did not fit and were computed in halves.
    """

    def __init__(self, role: str, settings: Training | Reference, *, rank: int = 0, ranks: int = 1) -> None:
        """role: the service, and the section of the config with its settings."""
        self._role = role
        self._settings = settings
        self._rank = rank
        self._ranks = ranks
        self.halved = 0

    @property
    def max_tokens(self) -> int:
        """Most tokens of a micro-batch."""
        return self._settings.tokens_per_micro_batch

    def compute(
        self, rows: list[Row], work: Callable[[list[Row]], T], undo: Callable[[], None] | None = None
    ) -> list[T]:
        """What `work` makes of the rows: of all, or of each half where memory does not suffice for all.

        undo: forgets what `work` has left behind where it failed.
        Raises OutOfMemory where a half does not fit, or rows cannot be halved: those of one sample, and those of ranks
        that share a model, since the others wait in the middle of the same layer.
        """
        try:
            return [work(rows)]
        except _FAULTS as error:
            shortage = self._named(error, _shape(rows), halvable=bool(halve(rows)))
        # Not before here are the tensors of the failed attempt gone: its traceback held them.
        halves = halve(rows) if self._settings.halve_on_oom and self._ranks == 1 else []
        if not halves:
            raise shortage
        if undo is not None:
            undo()
        _release()
        self.halved += 1
        log.warning("a micro-batch did not fit into memory and is halved", shape=_shape(rows))
        made: list[T] = []
        for half in halves:
            try:
                made.append(work(half))
            except _FAULTS as error:
                raise self._named(error, f"half of {_shape(rows)}", halvable=bool(halve(half))) from None
        return made

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Give an error of memory in what is not computed by micro-batches its name."""
        try:
            yield
        except _FAULTS as error:
            raise self._named(error, what, halvable=None) from None

    def _named(self, error: Exception, what: str, *, halvable: bool | None) -> OutOfMemory:
        """The error for a want of memory; any other is raised as it is. halvable: None where it is no micro-batch."""
        if not _is_shortage(error):
            raise error
        of = f" (rank {self._rank} of {self._ranks})" if self._ranks > 1 else ""
        said = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        helps = ", ".join(self._remedies(halvable))
        return OutOfMemory(
            f"the {self._role}{of} ran out of memory on {_device(error)} in {what}: {said}. "
            f"What helps, in this order: {helps}"
        )

    def _remedies(self, halvable: bool | None) -> Iterator[str]:
        """The settings that need less memory than the present ones, the cheapest in time first."""
        settings, role = self._settings, self._role
        if halvable:
            yield f"{role}.tokens_per_micro_batch below {settings.tokens_per_micro_batch}"
        if halvable is not None and isinstance(settings, Training) and not settings.gradient_checkpointing:
            yield f"{role}.gradient_checkpointing: true"
        if settings.dtype == "float32":
            yield f"{role}.dtype: bfloat16"
        if isinstance(settings, Learner):
            yield f"{role}.ranks above {self._ranks} on more devices"
        if halvable is False:
            yield "a smaller sampling.max_tokens"
        yield "a device with more memory, or fewer services on this one"


def _is_shortage(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _ON_CPU in str(error)


def _device(error: BaseException) -> str:
    """Where memory was short, and how much this process has had at most."""
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
        return f"cuda:{torch.cuda.current_device()} ({peak:.0f} MiB at most)"
    return f"cpu ({resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB at most)"


def _shape(rows: list[Row]) -> str:
    return f"a micro-batch of {len(rows)} × {max(row.length for row in rows)} tokens"


def _release() -> None:
    """Give the memory of the failed attempt back to where the next one takes it from."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
