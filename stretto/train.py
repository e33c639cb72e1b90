"""`stretto train`: a local run with a view of it, signals, and a report at the end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from shared.config import RunConfig
from shared.errors import ConfigError, DataError, ProtocolError, RunStopped, StrettoError, Unreachable
from stretto.contact import running_broker
from stretto.launcher import LocalRun
from stretto.live import LiveView, PlainView
from stretto.report import make_report, show_report

REFRESH_S = 1.0
ENDING = "ending: the learner saves what it has; once more to end at once"


async def train_locally(config: RunConfig, folder: Path, *, plain: bool, console: Console) -> None:
    """Run to the end. The first Ctrl-C drains and saves, the second ends everything at once.

    Raises RunStopped or ConfigError, with the reason, where the run failed; what was saved until then stays.
    """
    view = PlainView(console) if plain else LiveView(console)
    run = LocalRun(config, folder, on_event=view.event)
    interrupts = _Interrupts(run, view)
    try:
        await follow(run, view)
    finally:
        interrupts.close()
    if (folder / "metrics.jsonl").stat().st_size:
        show_report(console, make_report(folder))


async def follow(run: LocalRun, view: PlainView | LiveView) -> None:
    """Start a run, show it until it has ended, and leave no process of it. Raises RunStopped or ConfigError."""
    with view:
        try:
            await run.start()
            viewing = asyncio.create_task(_show(run, view), name="view")
            await run.wait()
            await viewing
        finally:
            await run.kill()


async def first_evaluation(run: LocalRun) -> dict[str, Any]:
    """Start a run, and end it once it has evaluated its version 0. Raises RunStopped or ConfigError."""
    await run.start()
    running = asyncio.create_task(run.wait(), name="run")
    found: list[dict[str, Any]] = []
    try:
        while not found and not running.done():
            with contextlib.suppress(Unreachable, ProtocolError):  # the run's own end tells why
                found = (await run.status())["evaluations"]
            await asyncio.wait([running], timeout=0 if found else REFRESH_S)
        if not found:  # it was faster
            await running
            found = json.loads((run.folder / "status.json").read_text())["evaluations"]
        if not found:
            raise RunStopped("the run has ended without an evaluation")
        return found[0]
    finally:
        await run.kill()
        await asyncio.gather(running, return_exceptions=True)


def new_run_folder(config: RunConfig, asked: Path | None) -> Path:
    """Where a new run goes: the folder asked for, or else NAME, NAME-2, … below `folder`, whichever is free.

    Raises ConfigError where the folder asked for holds a run.
    """
    if asked is None:
        return next(folder for folder in _numbered(config) if not _holds_run(folder))
    if _holds_run(asked):
        raise ConfigError(f"{asked} holds a run already: go on with it by --resume, or choose another --run-folder")
    return asked


def resumed_run_folder(config: RunConfig, asked: Path | None) -> Path:
    """The folder of the run to go on with: the one asked for, or else the latest of NAME, NAME-2 and so on.

    Raises DataError where there is none, ConfigError where the run in it is still going on.
    """
    holding = list(itertools.takewhile(_holds_run, _numbered(config)))
    folder = asked or (holding or [config.run_folder])[-1]
    if not (folder / "journal.sqlite").exists() and not any((folder / "checkpoints").glob("checkpoint-*")):
        raise DataError(f"{folder} has no journal or checkpoint to go on from; leave --resume out to begin anew")
    if running_broker(folder) is not None:
        raise ConfigError(f"the run in {folder} is still going on: stop it first, or begin another without --resume")
    return folder


def _numbered(config: RunConfig) -> Iterator[Path]:
    first = config.run_folder
    yield first
    for number in itertools.count(2):
        yield first.with_name(f"{first.name}-{number}")


def _holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").exists()


async def _show(run: LocalRun, view: PlainView | LiveView) -> None:
    """Feed the view until the run has ended."""
    version = 0
    while not run.ended:
        try:
            status = await run.status(wait_version=version + 1, wait_s=REFRESH_S)
        except (Unreachable, ProtocolError):
            continue  # the run's own end tells why
        view.update(status)
        version = status["version"]
        if status["stop_reason"] is not None:
            return


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Have SIGTERM raise KeyboardInterrupt where this is the main thread and nobody else wants the signal."""
    is_free = threading.current_thread() is threading.main_thread()
    is_free = is_free and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if is_free:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if is_free:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Interrupts:
    """Ctrl-C and SIGTERM: first drain, then kill."""

    def __init__(self, run: LocalRun, view: PlainView | LiveView) -> None:
        self._run, self._view = run, view
        self._tasks: list[asyncio.Task[None]] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)

    def _interrupt(self) -> None:
        ending = self._run.kill() if self._tasks else self._drain()
        self._tasks.append(asyncio.create_task(ending, name="interrupt"))

    async def _drain(self) -> None:
        self._view.event(ENDING)
        try:
            await self._run.drain("interrupted")
        except StrettoError as error:
            self._view.event(str(error))

    def close(self) -> None:
        """Back to the default handling."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
