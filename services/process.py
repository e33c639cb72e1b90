"""Runs a service as a process: one uvloop, its log, signals, and an exit code with one clear sentence."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

if TYPE_CHECKING:
    from services.exposition import Exposition
    from services.page import Page
from shared.errors import StrettoError
from shared.log import configure_logging, log

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_NEW_OBJECTS_A_COLLECTION = 20_000
"""Python's 700 cost the broker a tenth of its time; what the services leave in cycles is little."""


def shown(
    service: str, instance: str, fill: Callable[[Page], None], ailment: Callable[[], str | None]
) -> Exposition | None:
    """What shows a service over HTTP; None, and nothing is imported for it, where STRETTO_METRICS asks for none."""
    if not os.environ.get("STRETTO_METRICS"):
        return None
    from services.exposition import Exposition

    return Exposition(service, instance, fill, ailment)


def run_service(service: str, instance: str, work: Coroutine[Any, Any, None], log_file: Path | None) -> int:
    """Run `work` until it ends or SIGTERM or SIGINT cancels it. Returns the exit code.

    A StrettoError ends as its own sentence on stderr, anything else as one sentence there and a traceback in the log.
    """
    configure_logging(service, instance, log_file)
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS_A_COLLECTION)
    try:
        uvloop.run(_until_signal(work))
    except asyncio.CancelledError:
        log.info("stopped by a signal")
    except StrettoError as error:
        log.error("ended with an error", error=str(error))
        print(f"{instance}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:
        log.exception("ended with an unexpected error")
        where = f"; the traceback is in {log_file}" if log_file else ""
        print(f"{instance}: unexpected {type(error).__name__}: {error}{where}", file=sys.stderr, flush=True)
        return 1
    return 0


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    await task


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; `parent` is that thread's process.

    A process that is killed itself cannot end what it started.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
