"""A number for every token of the groups that wait, computed together in a thread. For stages that run a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np
import torch

from services.compute.memory import Room
from services.compute.packing import GroupBatch, PackedRows, micro_batches, pack, unpack
from shared.group import Columns, TrajectoryGroup, split_ragged

Compute = Callable[[PackedRows], torch.Tensor]


@torch.no_grad()
def number_tokens(compute: Compute, groups: Sequence[Columns], room: Room) -> list[np.ndarray]:
    """[T] float32 for each group, of all its tokens.

    groups: `prompt_tokens`, `tokens` and `tokens_offsets` of each. compute: [K] of packed tokens. Raises
    OutOfMemory.
    """
    batches = [as_batch(str(i), columns) for i, columns in enumerate(groups)]
    parts = [[np.zeros(0, dtype="f4")] * len(batch.tokens) for batch in batches]
    for rows in micro_batches(batches, room.max_tokens):
        for found in room.compute(rows, lambda rows: list(unpack(rows, compute(pack(rows)).numpy()))):
            for batch, i, part in found:
                parts[int(batch.group_id)][i] = part
    return [np.concatenate(of_samples).astype("f4") for of_samples in parts]


def as_batch(group_id: str, group: Columns, *names: str) -> GroupBatch:
    """A group as it goes through a model, with these columns of its tokens; without a mask all tokens count."""
    offsets = group["tokens_offsets"]
    mask = group.get("loss_mask", np.ones(len(group["tokens"]), dtype=bool))
    return GroupBatch(
        group_id=group_id,
        prompt=group["prompt_tokens"],
        tokens=split_ragged(group["tokens"], offsets),
        mask=split_ragged(mask, offsets),
        columns={name: split_ragged(group[name], offsets) for name in names},
        lags=np.zeros(len(offsets) - 1, dtype="i8"),
    )


class TokenStage:
    """The work of a stage that provides one number a token: groups that arrive meanwhile are computed together."""

    def __init__(self, column: str, compute: Compute, room: Room, thread: Executor) -> None:
        self._column = column
        self._compute = compute
        self._room = room
        self._thread = thread
        self._waiting: list[tuple[Columns, asyncio.Future[np.ndarray]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def process(self, group: TrajectoryGroup) -> Columns:
        """The column of one group."""
        future: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._waiting.append((group.columns, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work(), name=self._column)
        return {self._column: await future}

    async def _work(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            try:
                columns = [columns for columns, _ in taken]
                found = await asyncio.get_running_loop().run_in_executor(
                    self._thread, number_tokens, self._compute, columns, self._room
                )
            except Exception as error:
                for _, future in taken:
                    future.set_exception(error)
                continue
            for (_, future), numbers in zip(taken, found, strict=True):
                future.set_result(numbers)
