"""Shows a service over HTTP where STRETTO_METRICS=host:port says: /metrics for Prometheus, and /health."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, Metric, generate_latest
from prometheus_client.registry import Collector

from services.page import Page
from shared.errors import ConfigError
from shared.log import log
from shared.memory import memory_figures

TICK_S = 0.25
TICKS = 60
"""The event loop's lag is measured each tick; the largest of the last so many is shown."""
CLOSE_S = 1.0


class Exposition(Collector):
    """Answers from the service's own event loop, so that an answer is a sign of its life.

    address: where it listens, while it does.
    """

    def __init__(
        self, service: str, instance: str, fill: Callable[[Page], None], ailment: Callable[[], str | None]
    ) -> None:
        """fill: adds the service's own metrics to a page. ailment: why it is of no use now; None while it is."""
        self._labels = {"service": service, "instance": instance}
        self._fill = fill
        self._ailment = ailment
        self._lags = deque([0.0], maxlen=TICKS)
        self._lag: asyncio.Task[None] | None = None
        self.address: str | None = None
        app = web.Application()
        app.add_routes([web.get("/metrics", self._metrics), web.get("/health", self._health)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)

    async def start(self) -> None:
        """Listen where the environment says, if it does; port 0 takes a free one. Raises ConfigError where it cannot.

        Does nothing the second time.
        """
        listen = os.environ.get("STRETTO_METRICS", "")
        if not listen or self._lag is not None:
            return
        host, _, port = listen.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"STRETTO_METRICS should be host:port, such as 0.0.0.0:9500, but is {listen!r}")
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host.strip("[]"), int(port)).start()
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise ConfigError(f"cannot show metrics at {listen}: {error}; choose another metrics.port") from None
        self.address = f"http://{host}:{self._runner.addresses[0][1]}"
        self._lag = asyncio.create_task(self._measure_lag(), name="event loop lag")
        log.info("shows metrics", address=self.address)

    async def close(self) -> None:
        """Listen no more."""
        if self._lag is not None:
            self._lag.cancel()
        await self._runner.cleanup()

    def collect(self) -> Iterable[Metric]:
        """The metrics as they are now."""
        page = Page(**self._labels)
        page.add_figures(memory_figures())
        page.add("event_loop_lag_seconds", "the latest that a timer fired in the last 15 s", max(self._lags))
        self._fill(page)
        return page.families.values()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _health(self, _: web.Request) -> web.Response:
        ailment = self._ailment()
        return web.Response(text=f"{ailment or 'ok'}\n", status=200 if ailment is None else 503)

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lags.append(loop.time() - due)
