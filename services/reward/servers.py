"""Asks a reward server of the user, over ZeroMQ or HTTP, with the samples of all groups in flight. For score.py."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from typing import Any

import aiohttp

from protocol.channel import Client
from protocol.messages import ScoreRequest, Scores
from services.reward.signals import Score, invalid, read_answer
from shared.config import Reward, Signal
from shared.errors import ConfigError, StrettoError

LARGEST_ANSWER = 8 << 20  # bytes
BACKOFF_S = 0.2
OPEN_AFTER = 5
"""Requests that fail in a row before the server is left alone."""
OPEN_FOR_S = 10.0


class RewardServer:
    """One server and the samples that wait for it. What fails is invalid, with a reason that names it."""

    def __init__(self, signal: Signal, settings: Reward) -> None:
        """Raises ConfigError where the environment variable with the token is not set."""
        assert signal.server is not None
        self._signal = signal
        self._address = signal.server
        self._timeout_s = settings.timeout_s
        self._attempts = settings.attempts
        self._room = asyncio.Semaphore(signal.concurrency)
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[Score]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._closed_until = 0.0
        self._client: Client | None = None
        self._session: aiohttp.ClientSession | None = None
        self._headers: dict[str, str] = {}
        if signal.auth_env is not None:
            token = os.environ.get(signal.auth_env)
            if not token:
                raise ConfigError(f"signal {signal.name}: the environment variable {signal.auth_env} is not set")
            self._headers = {"Authorization": f"Bearer {token}"}

    async def score(self, arguments: dict[str, Any]) -> Score:
        """The score of one sample."""
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append((arguments, future))
        task = asyncio.create_task(self._send(), name=f"samples for {self._address}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await future

    async def close(self) -> None:
        """Close the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
        if self._session is not None:
            await self._session.close()

    async def _send(self) -> None:
        """Bring a batch of those that wait, once there is room; each sample that came starts one of these."""
        async with self._room:
            await asyncio.sleep(0)
            size = self._signal.batch_size
            batch = [pair for pair in self._waiting[:size] if not pair[1].done()]
            del self._waiting[:size]
            if not batch:
                return
            try:
                scores = await self._scores([sample for sample, _ in batch])
            except Exception as error:
                scores = [self._invalid(f"failed: {type(error).__name__}")] * len(batch)
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)

    async def _scores(self, samples: list[dict[str, Any]]) -> list[Score]:
        reason = "was not asked"
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.5))
            if time.monotonic() < self._closed_until:
                reason = f"is left alone for {OPEN_FOR_S:g} s after {OPEN_AFTER} failures in a row"
                break
            try:
                async with asyncio.timeout(self._timeout_s):
                    answers = await self._ask(samples)
                if not isinstance(answers, list) or len(answers) != len(samples):
                    found = len(answers) if isinstance(answers, list) else "no list of"
                    raise StrettoError(f"gave {found} scores for {len(samples)} samples")
            except TimeoutError:
                reason = f"gave no answer in {self._timeout_s:g} s"
            except (StrettoError, aiohttp.ClientError, ValueError, OSError) as error:
                reason = str(error) if isinstance(error, StrettoError) else f"failed: {type(error).__name__}"
            else:
                self._failures = 0
                return [self._read(answer) for answer in answers]
            self._failures += 1
            if self._failures >= OPEN_AFTER:
                self._closed_until = time.monotonic() + OPEN_FOR_S
        return [self._invalid(reason)] * len(samples)

    def _invalid(self, reason: str) -> Score:
        return invalid(f"{self._signal.name}: reward server {self._address} {reason}")

    def _read(self, answer: Any) -> Score:
        if isinstance(answer, dict):
            return self._invalid(f"says: {answer.get('invalid', 'a map without `invalid`')}")
        return read_answer(answer, f"{self._signal.name}: reward server {self._address}")

    async def _ask(self, samples: list[dict[str, Any]]) -> Any:
        if self._address.startswith("http"):
            return await self._post(samples)
        if self._client is None:
            self._client = Client(self._address, peer="reward server")
        scores, _ = await self._client.request(ScoreRequest(samples=samples), Scores, deadline_s=self._timeout_s)
        return scores.scores

    async def _post(self, samples: list[dict[str, Any]]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        body: dict[str, Any] = {"samples": samples}
        if self._signal.format == "openrlhf":
            body = {
                "query": [sample["prompt"] + sample["completion"] for sample in samples],
                "prompts": [sample["prompt"] for sample in samples],
                "labels": [sample.get("answer") for sample in samples],
            }
        post = self._session.post(self._address, json=body, headers=self._headers, allow_redirects=False)
        async with post as response:
            if response.status != 200:
                raise StrettoError(f"answered with status {response.status}")
            read = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                read += chunk
                if len(read) > LARGEST_ANSWER:
                    raise StrettoError(f"answered with more than {LARGEST_ANSWER} bytes")
        try:
            answer = json.loads(read)
        except (ValueError, RecursionError):
            raise StrettoError("answered with something that is not JSON") from None
        key = "rewards" if self._signal.format == "openrlhf" else "scores"
        return answer.get(key) if isinstance(answer, dict) else None
