"""Where the time of a service goes: every second is in exactly one bucket, so the buckets add up to the wall time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Bucket = Literal["compute", "prompts", "rewards", "groups", "weights", "room", "overhead"]
BUCKETS: tuple[str, ...] = get_args(Bucket)
"""compute, waiting for (prompts, rewards, groups, weights, room), and everything else (overhead)."""


class TimeAccount:
    """The time account of one service. One bucket is open at any time; `enter` closes it and opens another.

    Spans (start, end, bucket; unix seconds) of what was closed since the last `take_spans` are kept for the timeline.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(BUCKETS, 0.0)
        self._bucket: Bucket = "overhead"
        self._since = self.started = clock()
        self._spans: list[tuple[float, float, str]] = []

    def enter(self, bucket: Bucket) -> None:
        """Everything from now on goes to `bucket`."""
        if bucket == self._bucket:
            return
        now = self._clock()
        self._seconds[self._bucket] += now - self._since
        if now > self._since:
            self._spans.append((self._since, now, self._bucket))
        self._bucket, self._since = bucket, now

    @contextmanager
    def within(self, bucket: Bucket) -> Iterator[None]:
        """The time of a `with` block goes to `bucket`, what follows to the bucket that was open before."""
        before = self._bucket
        self.enter(bucket)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """Seconds in each bucket up to now."""
        seconds = dict(self._seconds)
        seconds[self._bucket] += self._clock() - self._since
        return seconds

    def take_spans(self) -> list[tuple[float, float, str]]:
        """The spans closed since the last call."""
        spans, self._spans = self._spans, []
        return spans
