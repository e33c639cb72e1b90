"""Structured logs: one JSON object a line, with service, instance and time."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger()
"""The logger that every module uses: `log.info("leased", group=group_id)`."""


def configure_logging(service: str, instance: str, path: Path | None = None) -> None:
    """Send this process's logs as JSON lines to `path`, or to stderr where there is none."""
    stream = path.open("a", buffering=1) if path else sys.stderr
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=_plain),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
    )
    structlog.contextvars.bind_contextvars(service=service, instance=instance)
    logging.basicConfig(stream=stream, level=logging.WARNING, format='{"level": "warning", "event": "%(message)s"}')


def warnings_only() -> None:
    """Show what went wrong, on stderr, to the user of a command; a service has a log of its own."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
