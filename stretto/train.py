"""`stretto train`: a local run with a view of it, signals, and a report at the end."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from rich.console import Console

from shared.config import RunConfig
from shared.errors import ConfigError, Unreachable
from stretto.launcher import LocalRun
from stretto.live import LiveView, PlainView
from stretto.report import make_report, show_report

REFRESH_S = 1.0


async def train_locally(config: RunConfig, *, resume: bool, plain: bool, console: Console) -> None:
    """Run to the end. The first Ctrl-C drains and saves, the second ends everything at once.

    Raises RunStopped, with the reason, where the run failed; what was saved until then stays.
    """
    folder = choose_folder(config, resume=resume)
    console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)
    view = PlainView(console) if plain else LiveView(console)
    run = LocalRun(config, folder, resume=resume, on_event=view.event)
    with view:
        interrupts = _Interrupts(run, view)
        try:
            await run.start()
            viewing = asyncio.create_task(_show(run, view), name="view")
            await run.wait()
        finally:
            interrupts.close()
            await run.kill()
        await viewing
    if (folder / "metrics.jsonl").stat().st_size:
        show_report(console, make_report(folder))


def choose_folder(config: RunConfig, *, resume: bool) -> Path:
    """The run's folder: that of the run to resume, else a new one (`NAME`, then `NAME-2`, …)."""
    folder = config.run_folder
    if resume:
        if not (folder / "checkpoints").is_dir():
            raise ConfigError(f"{folder} has no checkpoints to resume from; leave --resume out to begin anew")
        (folder / "status.json").unlink(missing_ok=True)
        return folder
    number = 2
    while (folder / "config.yaml").exists():
        folder = config.run_folder.with_name(f"{config.run_folder.name}-{number}")
        number += 1
    return folder


async def _show(run: LocalRun, view: PlainView | LiveView) -> None:
    """Feed the view until the run has ended."""
    version = 0
    while True:
        try:
            status = await run.status(wait_version=version + 1, wait_s=REFRESH_S)
        except (Unreachable, AssertionError):
            return  # the broker is gone: the run is over, and its own words tell why
        view.update(status)
        version = status["version"]
        if status["stop_reason"] is not None:
            return


class _Interrupts:
    """Ctrl-C and SIGTERM: first drain, then kill."""

    def __init__(self, run: LocalRun, view: PlainView | LiveView) -> None:
        self._run, self._view = run, view
        self._count = 0
        self._task: asyncio.Task[None] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)

    def _interrupt(self) -> None:
        self._count += 1
        if self._count == 1:
            self._view.event("ending: the learner saves what it has; once more to end at once")
            self._task = asyncio.create_task(self._run.drain("interrupted"))
        else:
            self._task = asyncio.create_task(self._run.kill())

    def close(self) -> None:
        """Back to the default handling."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
