"""`stretto dead-letters` and `stretto requeue`: the groups that failed too often, of a run that goes on or not."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from protocol.messages import DeadLetters, DeadLettersRequest, Requeue, Requeued
from services.broker.journal import FILE
from services.broker.run import Run
from shared.config import load_config
from shared.errors import DataError
from stretto.contact import ask, running_broker


async def list_letters(run_folder: Path, broker: str | None) -> list[dict[str, Any]]:
    """The dead letters of a run, oldest first. Raises DataError or Unreachable."""
    address = broker or running_broker(run_folder)
    if address is not None:
        return (await ask(address, DeadLettersRequest(), DeadLetters)).letters
    with _run_of(run_folder) as run:
        return run.dead_letters()


async def requeue_letters(run_folder: Path, broker: str | None, group_ids: list[str] | None) -> int:
    """Have the prompts of dead letters (None: of all) drawn again; returns how many.

    Raises ProtocolError where a group is no dead letter, DataError or Unreachable.
    """
    address = broker or running_broker(run_folder)
    if address is not None:
        return (await ask(address, Requeue(group_ids=group_ids), Requeued)).count
    with _run_of(run_folder) as run:
        count = run.requeue(group_ids)
        await run.journal.flush()
    return count


def show_letters(console: Console, letters: list[dict[str, Any]]) -> None:
    """Print dead letters for a person."""
    for letter in letters:
        where = f"row {letter['row']}, epoch {letter['epoch']}"
        console.print(f"[bold]{letter['group_id']}[/] failed at the stage {letter['stage']} ({where})", highlight=False)
        console.print(f"  prompt: {escape(letter['prompt'])}", highlight=False)
        for number, error in enumerate(letter["errors"], start=1):
            console.print(f"  {number}. {escape(error)}", highlight=False)
    console.print(f"{len(letters)} dead letters", style="green" if not letters else "yellow")


def _run_of(run_folder: Path) -> closing[Run]:
    if not (run_folder / FILE).is_file():
        raise DataError(f"{run_folder} is not the folder of a run with a journal: it has no {FILE}")
    return closing(Run(load_config(run_folder / "config.yaml"), run_folder))
